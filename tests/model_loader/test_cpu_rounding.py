"""What `--quantization` and `--activations` mean on a CPU beyond the formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.harness import load_model

from atom.config import ConfigError
from atom.model_loader.drafts.quantization import online_for_draft
from atom.model_loader.quantization import on_platform
from atom.model_ops.quant.base import UnquantizedConfig
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


def test_drafts_follow_a_quantised_target_on_a_cpu() -> None:
    assert online_for_draft(OnlineConfig("int4"), cpu_platform()) == OnlineConfig("int8")
    for target, platform in ((UnquantizedConfig(), cpu_platform()), (OnlineConfig("int4"), GPU)):
        assert isinstance(online_for_draft(target, platform), UnquantizedConfig)


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
