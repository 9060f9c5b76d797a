"""DeepSeek models in C++ kernels from end to end on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from model_ops.batches import Part, attention_metadata
from models import checkpoints
from models.checkpoints import prompt
from models.harness import ModelBench
from transformers import DeepseekV3Config

from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.program import Arena, record
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.formats.online import OnlineConfig
from atom.model_ops.rotary import AttentionInputs
from atom.models.moe import deepseek_v2
from atom.platform import cpu_platform

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


def test_one_product_for_queries_and_latents_has_the_bits_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.deepseek_v3(tmp_path, attention_bias=True, **SIZES)
    tokens = prompt(20)
    merged = ModelBench(tmp_path)
    monkeypatch.setattr(deepseek_v2, "are_alike", lambda *_: False)
    separate = ModelBench(tmp_path)
    for bench, is_merged in ((merged, True), (separate, False)):
        attention = bench.model.get_submodule("model.layers.1.self_attn")
        assert isinstance(attention, deepseek_v2.DeepseekV2Attention)
        assert attention.is_merged is is_merged
    assert torch.equal(merged.run(tokens, [14, 1]), separate.run(tokens, [14, 1]))


def test_writing_latents_alone_writes_what_a_pass_writes(tmp_path: Path) -> None:
    checkpoints.deepseek_v3(tmp_path, attention_bias=True, **SIZES)
    bench = ModelBench(tmp_path)
    bench.run(prompt(5), [5])
    attention = bench.model.get_submodule("model.layers.0.self_attn")
    assert isinstance(attention, deepseek_v2.DeepseekV2Attention)
    x, rotary = random_rows(5, SIZES["hidden_size"]), bench.model.get_submodule("model.rotary")
    metadata = attention_metadata([Part(5, 0, [1, 2])], bench.block_size, torch.device("cpu"))
    pool = attention.attn.kv_cache.latent
    written = []
    for run in (attention, attention.write_kv):
        pool.zero_()
        run(x, AttentionInputs(torch.arange(5), metadata, rotary))
        written.append(pool.clone())
    assert torch.equal(*written)
    assert written[0].any()


def random_rows(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


def test_projections_that_are_stored_in_two_ways_are_two_products() -> None:
    config = DeepseekV3Config(**SIZES, num_attention_heads=4)
    context = LayerContext.create(torch.float32, 8, cpu_platform())
    context = replace(context, device=torch.device("meta"))
    for ignored, merged in (((), True), (("*.q_a_proj",), False)):
        quant = OnlineConfig("int8", ignored)
        layer = deepseek_v2.DeepseekV2Attention(config, 0, replace(context, quant=quant), "attn")
        assert layer.is_merged is merged
    assert layer.q_a_proj.storage.format is None
    assert layer.kv_a_proj_with_mqa.storage.format is not None


@pytest.mark.parametrize("make", MODELS)
def test_a_step_is_one_program(make: partial[checkpoints.Checkpoint], tmp_path: Path) -> None:
    """Nothing in it is an operation of torch; a replay computes what the step does."""
    make(tmp_path)
    bench = ModelBench(tmp_path, dtype=torch.bfloat16)
    seen: list[ModelInput] = []

    def forward(model_input: ModelInput) -> ModelOutput:
        seen.append(model_input)
        return bench.model.forward(model_input)

    bench.run_with(forward)
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
