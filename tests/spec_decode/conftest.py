"""Targets that drafts are loaded against: random weights, no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from one_thread import one_thread  # noqa: F401  # a fixture
from spec_decode.draft_bench import HIDDEN, NUM_LAYERS, VOCAB
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

from atom.model_loader.source import ModelSource
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.registry import create_model
from atom.platform import cpu_platform

Target = tuple[CausalLM, ModelSource]


def create_target(config: PretrainedConfig, folder: Path) -> Target:
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    model = create_model(config, context)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2, generator=generator)
    return model, ModelSource(folder, "target", config, frozenset(), torch.float32)


def llama_config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


@pytest.fixture(scope="session")
def llama_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Grouped-query attention, 8 layers, untied head."""
    return create_target(llama_config(tied=False), tmp_path_factory.mktemp("llama-target"))


@pytest.fixture(scope="session")
def tied_llama_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The same with the embedding as its head."""
    return create_target(llama_config(tied=True), tmp_path_factory.mktemp("tied-target"))


@pytest.fixture(scope="session")
def mla_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Latent attention, 8 layers, all dense."""
    config = DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        first_k_dense_replace=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        num_nextn_predict_layers=0,
    )
    return create_target(config, tmp_path_factory.mktemp("mla-target"))


@pytest.fixture
def random_rows() -> Callable[[int, int], tuple[list[int], list[torch.Tensor]]]:
    """(tokens, hidden size) -> next tokens and three aux hidden states."""
    generator = torch.Generator().manual_seed(2)

    def rows(count: int, size: int = HIDDEN) -> tuple[list[int], list[torch.Tensor]]:
        tokens = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
        return tokens, [torch.randn(count, size, generator=generator) * 3 for _ in range(3)]

    return rows
