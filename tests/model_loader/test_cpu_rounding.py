"""What `--quantization` and `--activations` mean on a CPU beyond the formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models.harness import load_model

from atom.config import ConfigError
from atom.model_loader.drafts.quantization import online_for_draft
from atom.model_loader.quantization import on_platform
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.base import QuantConfig, UnquantizedConfig
from atom.model_ops.quant.formats.online import OnlineConfig
from atom.model_ops.quant.summary import describe_weights
from atom.platform import Platform, cpu_platform

GPU = Platform("rocm", "gfx942", True)


@pytest.mark.parametrize(("name", "expected"), [("int8", True), ("int4", True), ("fp8", False)])
def test_integers_include_the_vocabulary_on_a_cpu(name: str, expected: bool) -> None:
    config = OnlineConfig(name, ("lm_head",))
    assert on_platform(config, GPU) == config
    found = on_platform(config, cpu_platform())
    assert (found.method_for("model.embed_tokens", kind="embedding") is not None) is expected
    assert found.method_for("lm_head", kind="head") is None


@pytest.mark.parametrize(
    ("asked", "target", "dtype", "platform", "expected"),
    [
        ("auto", OnlineConfig("int4"), torch.float32, cpu_platform(), OnlineConfig("int8")),
        ("auto", UnquantizedConfig(), torch.bfloat16, cpu_platform(), OnlineConfig("int8")),
        ("auto", UnquantizedConfig(), torch.float32, cpu_platform(), UnquantizedConfig()),
        ("auto", OnlineConfig("int4"), torch.bfloat16, GPU, UnquantizedConfig()),
        ("none", OnlineConfig("int4"), torch.bfloat16, cpu_platform(), UnquantizedConfig()),
        ("fp8", UnquantizedConfig(), torch.bfloat16, GPU, OnlineConfig("fp8")),
        ("int4", UnquantizedConfig(), torch.float32, cpu_platform(), OnlineConfig("int4")),
    ],
)
def test_how_an_unquantised_draft_is_quantised(
    asked: str,
    target: QuantConfig,
    dtype: torch.dtype,
    platform: Platform,
    expected: QuantConfig,
) -> None:
    found = online_for_draft(asked, target, LayerContext.create(dtype, 64, platform))
    assert type(found) is type(expected)
    assert getattr(found, "name", None) == getattr(expected, "name", None)


@pytest.mark.parametrize(
    ("activations", "words"),
    [
        ("float", "inputs as they are"),
        ("int8", "inputs rounded to int8 per group 32"),
        ("auto", "inputs rounded to int16 per token"),
    ],
)
def test_inputs_are_rounded_as_asked(tiny_llama_dir: Path, activations: str, words: str) -> None:
    model = load_model(tiny_llama_dir, 64, quantization="int8", activations=activations)
    summary = describe_weights(model, OnlineConfig("int8"))
    assert summary.startswith(f"int8 channel weights, {words}")
    assert not list(model.model.embed_tokens.parameters())
    assert model.lm_head.dense().shape == (model.lm_head.vocab_size, 64)


def test_inputs_of_unquantised_weights(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--activations float would have no effect"):
        load_model(tiny_llama_dir, 64, activations="float")
