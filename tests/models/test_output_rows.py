"""Where a step names the rows that are read, the last layer computes no others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import prompt
from models.harness import ModelBench
from spec_decode.engines import create_engine
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.model_ops.kernels.native.build import native_build
from atom.models.llama import LlamaModel

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

MLA_SIZES = {"hidden_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
MODELS = [
    checkpoints.llama,
    checkpoints.qwen3,
    pytest.param(partial(checkpoints.deepseek_v3, moe_intermediate_size=32, **MLA_SIZES), id="v3"),
]


class Selecting:
    """Runs a model that is told which rows are read.

    Attributes:
        mlp_rows: of the last layer's MLP in the last run.
    """

    def __init__(self, bench: ModelBench, rows: list[int] | None) -> None:
        self._forward = bench.model.forward
        self._rows = rows
        self.mlp_rows = -1
        layers = bench.model.get_submodule("model.layers")
        layers[-1].mlp.register_forward_pre_hook(self._count)

    def _count(self, _: Any, args: tuple[Any, ...]) -> None:
        self.mlp_rows = len(args[0])

    def forward(self, model_input: ModelInput) -> ModelOutput:
        """The output, with zeros in the rows that were not named."""
        if self._rows is None:
            return self._forward(model_input)
        rows = torch.tensor(self._rows, dtype=torch.int64)
        output = self._forward(replace(model_input, output_rows=rows))
        of_rows = output.at(rows)
        hidden = of_rows.new_zeros(len(model_input.input_ids), of_rows.shape[1])
        hidden[rows] = of_rows
        return replace(output, hidden_states=hidden, output_rows=None)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [[20], [3, 19, 20], []], ids=str)
def test_named_rows_have_the_bits_that_they_have_among_all(
    make, dtype: torch.dtype, rows: list[int], tmp_path: Path
) -> None:
    make(tmp_path)
    bench = ModelBench(tmp_path, dtype=dtype)
    every = bench.step({"all": prompt(21)})["all"]
    runner = Selecting(bench, rows)
    bench.forward = runner.forward
    found = bench.step({"some": prompt(21)})["some"]
    assert runner.mlp_rows == len(rows)
    assert torch.equal(found[rows], every[rows])


def test_an_asked_output_of_the_last_layer_has_all_rows(tmp_path: Path) -> None:
    checkpoints.llama(tmp_path)
    bench = ModelBench(tmp_path)
    bench.model.set_aux_layer_ids((3,))
    bench.step({"all": prompt(21)})
    assert bench.output is not None
    (every,) = bench.output.aux_hidden_states
    bench.forward = Selecting(bench, [20]).forward
    bench.step({"some": prompt(21)})
    assert torch.equal(bench.output.aux_hidden_states[0], every)


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        (SamplingParams(temperature=0, max_tokens=2), [[], [18]]),
        (SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1), [None] * 2),
    ],
    ids=["tokens", "prompt_logprobs"],
)
def test_an_engine_names_the_rows_of_logits(
    params: SamplingParams,
    asked: list[list[int] | None],
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoints.llama(tmp_path, vocab_size=len(byte_level_tokenizer))
    byte_level_tokenizer.save_pretrained(tmp_path)
    seen: list[list[int] | None] = []
    forward = LlamaModel.forward

    def watched(model: LlamaModel, model_input: ModelInput) -> ModelOutput:
        rows = model_input.output_rows
        if len(model_input.input_ids) > 1:
            seen.append(None if rows is None else rows.tolist())
        return forward(model, model_input)

    engine = create_engine(tmp_path, max_num_batched_tokens=20)
    try:
        monkeypatch.setattr(LlamaModel, "forward", watched)
        engine.generate([prompt(39)], params, use_tqdm=False)
    finally:
        engine.shutdown()
    assert seen == asked
