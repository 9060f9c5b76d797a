"""DeepSeek models in C++ kernels from end to end on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.checkpoints import prompt
from models.harness import ModelBench

from atom.graphs.runner import EagerRunner
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.program import Arena, record
from atom.model_ops.metadata import ModelInput, ModelOutput

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

# Sizes that the kernels take.
SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "v_head_dim": 16,
}
MODELS = [
    pytest.param(partial(checkpoints.deepseek_v2, **SIZES | {"q_lora_rank": None}), id="v2_lite"),
    pytest.param(partial(checkpoints.deepseek_v3, **SIZES), id="v3"),
]


@pytest.mark.parametrize("make", MODELS)
def test_logits_equal_transformers_and_have_the_same_bits_in_every_split(
    make: partial[checkpoints.Checkpoint], tmp_path: Path
) -> None:
    checkpoint = make(tmp_path)
    bench = ModelBench(tmp_path)
    tokens = prompt(34)
    whole = bench.run(tokens, [34], "whole")
    torch.testing.assert_close(whole, checkpoint.logits(tokens), atol=1e-4, rtol=0)
    assert torch.equal(bench.run(tokens, [1], "decoded"), whole)
    assert torch.equal(bench.run(tokens, [20, 4], "verified"), whole)


@pytest.mark.parametrize("make", MODELS)
def test_a_step_is_one_program(make: partial[checkpoints.Checkpoint], tmp_path: Path) -> None:
    """Nothing in it is an operation of torch; a replay computes what the step does."""
    make(tmp_path)
    bench = ModelBench(tmp_path, dtype=torch.bfloat16)
    seen: list[ModelInput] = []

    def forward(model_input: ModelInput) -> ModelOutput:
        seen.append(model_input)
        return bench.model.forward(model_input)

    bench.run_with(EagerRunner(forward))
    bench.step({"a": prompt(20, 1), "b": prompt(7, 2)})
    bench.step({"a": [3], "b": [4]})
    assert bench.output is not None
    expected = bench.output.hidden_states
    with torch.inference_mode():
        result, program = record(
            lambda: bench.model.forward(seen[-1]), lambda out: [out.hidden_states], Arena()
        )
        program.replay()
    assert torch.equal(result.hidden_states, expected)
