"""Configurations and files that are published although they contradict themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import Checkpoint, edit_config, prompt
from models.harness import ModelBench, load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atom.config import ConfigError, ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model
from atom.platform import cpu_platform

TOKENS = prompt(12)


def logits(folder: Path) -> torch.Tensor:
    return ModelBench(folder).run(TOKENS, [len(TOKENS)])


def as_transformers_reads(folder: Path) -> torch.Tensor:
    return Checkpoint(folder, AutoModelForCausalLM.from_pretrained(folder).eval()).logits(TOKENS)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class TestTiedHeads:
    def test_a_different_head_is_used_as_transformers_uses_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoint = checkpoints.llama(tmp_path)
        edit_config(tmp_path, tie_word_embeddings=True)
        with caplog.at_level(logging.WARNING, "atom"):
            found = logits(tmp_path)
        assert_same(found, checkpoint.logits(TOKENS))
        assert_same(found, as_transformers_reads(tmp_path))
        assert "lm_head.weight holds other values than model.embed_tokens.weight" in caplog.text

    def test_an_equal_one_stays_tied(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        checkpoint = checkpoints.qwen3(tmp_path, tie_word_embeddings=True)
        edit(
            tmp_path,
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].double()}),
        )
        with caplog.at_level(logging.WARNING, "atom"):
            assert_same(logits(tmp_path), checkpoint.logits(TOKENS))
        assert resolve_model(ModelOptions(str(tmp_path))).hf_config.tie_word_embeddings
        assert not caplog.text

    def test_a_nested_config(self, tmp_path: Path) -> None:
        checkpoint = checkpoints.kimi_k25(tmp_path)
        text = checkpoint.reference.config.text_config.to_dict()
        edit_config(
            tmp_path,
            tie_word_embeddings=True,
            text_config={**text, "model_type": "kimi_k2", "tie_word_embeddings": True},
        )
        assert_same(logits(tmp_path), checkpoint.logits(TOKENS))


@pytest.mark.parametrize(
    ("make", "model_type"),
    [
        (checkpoints.llama, "mistral"),
        (checkpoints.llama, "granite"),
        (checkpoints.llama, "qwen3"),
        (checkpoints.qwen3, "llama"),
        (checkpoints.deepseek_v3, "deepseek_v2"),
    ],
)
def test_a_type_that_contradicts_the_architecture_is_refused(
    make: Callable[[Path], Checkpoint], model_type: str, tmp_path: Path
) -> None:
    make(tmp_path)
    edit_config(tmp_path, model_type=model_type)
    config = resolve_model(ModelOptions(str(tmp_path))).hf_config
    with pytest.raises(ConfigError, match=f"model_type '{model_type}' contradicts architecture"):
        create_model(config, LayerContext.create(torch.float32, 32, cpu_platform()))


class TestWindows:
    KINDS = ("full_attention", "sliding_attention", "sliding_attention")

    def test_a_switched_off_window_is_none(self, tmp_path: Path) -> None:
        checkpoint = checkpoints.qwen3(tmp_path)
        edit_config(
            tmp_path, use_sliding_window=False, sliding_window=4, layer_types=list(self.KINDS)
        )
        assert_same(logits(tmp_path), checkpoint.logits(TOKENS))

    def test_a_missing_window_is_named(self, tmp_path: Path) -> None:
        checkpoints.qwen3(tmp_path)
        edit_config(
            tmp_path, use_sliding_window=True, sliding_window=None, layer_types=list(self.KINDS)
        )
        with pytest.raises(ConfigError, match="layer 1 attends to a window, and there is no slid"):
            load_model(tmp_path, 32)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (checkpoints.qwen3, {"mlp_bias": True}),
        (checkpoints.deepseek_v3, {"mlp_bias": True}),
        (checkpoints.llama, {"hidden_act": "swish"}),
        (checkpoints.deepseek_v3, {"hidden_act": "swish"}),
    ],
)
def test_fields_that_change_nothing(
    make: Callable[[Path], Checkpoint], fields: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = make(tmp_path)
    edit_config(tmp_path, **fields)
    found = logits(tmp_path)
    assert_same(found, checkpoint.logits(TOKENS))
    assert_same(found, as_transformers_reads(tmp_path))


def test_no_shared_experts_as_transformers_saves_them(tmp_path: Path) -> None:
    checkpoint = checkpoints.deepseek_v3(tmp_path, n_shared_experts=0)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["model.layers.1.mlp.shared_experts.up_proj.weight"].numel() == 0
    assert_same(logits(tmp_path), checkpoint.logits(TOKENS))


def test_kimi_as_transformers_saves_it(tmp_path: Path) -> None:
    checkpoint = checkpoints.kimi_k25(tmp_path)
    checkpoint.reference.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "language_model.model.blocks.0.input_layernorm.weight" in saved
    assert_same(logits(tmp_path), checkpoint.logits(TOKENS))


def test_an_adapter_beside_the_model_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = checkpoints.llama(tmp_path)
    adapter = {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)}
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    with caplog.at_level(logging.WARNING, "atom"):
        assert_same(logits(tmp_path), checkpoint.logits(TOKENS))
    assert "adapters are not applied: adapter_model.safetensors" in caplog.text
