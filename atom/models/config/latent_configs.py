"""Configurations of models with latent attention that have a model class here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from atom.models.config.model_config import ModelConfig


@dataclass(kw_only=True)
class LatentConfig(ModelConfig):
    """Fields of latent attention and experts; `head_dim` means the rotary dimensions."""

    num_attention_heads: int = 128
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    head_dim: int | None = None
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    n_shared_experts: int = 1

    def complete(self) -> None:
        self.head_dim = self.qk_rope_head_dim
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().complete()


@dataclass(kw_only=True)
class DeepseekV2Config(LatentConfig):
    """DeepSeek-V2's fields."""

    model_type = "deepseek_v2"
    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "n_routed_experts"}

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    mlp_bias: bool = False
    first_k_dense_replace: int = 0
    v_head_dim: int = 128
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str | None = "greedy"
    norm_topk_prob: bool | None = False
    num_experts_per_tok: int | None = None
    routed_scaling_factor: float = 1.0


@dataclass(kw_only=True)
class DeepseekV3Config(LatentConfig):
    """DeepSeek-V3's fields."""

    model_type = "deepseek_v3"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_key_value_heads: int | None = 128
    max_position_embeddings: int = 4096
    rope_parameters: dict[str, Any] | None = None
    rope_interleave: bool | None = True
    first_k_dense_replace: int | None = 3
    v_head_dim: int | None = 128
    n_routed_experts: int = 256
    n_group: int | None = 8
    topk_group: int | None = 4
    norm_topk_prob: bool | None = True
    num_experts_per_tok: int | None = 8
    routed_scaling_factor: float = 2.5
    num_nextn_predict_layers: int = 1


@dataclass(kw_only=True)
class KimiK2Config(DeepseekV3Config):
    """Kimi-K2's text model, which is DeepSeek-V3."""

    model_type = "kimi_k2"


@dataclass(kw_only=True)
class DeepseekV32Config(LatentConfig):
    """DeepSeek-V3.2's fields: V3's, those of its indexer, and each layer's type of MLP."""

    model_type = "deepseek_v32"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
    }

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_key_value_heads: int = 128
    max_position_embeddings: int = 163840
    rope_parameters: dict[str, Any] | None = None
    mlp_bias: bool = False
    head_dim: int = 64
    first_k_dense_replace: int = 3
    mlp_layer_types: list[str] | None = None
    q_lora_rank: int = 1536
    v_head_dim: int = 128
    n_routed_experts: int = 256
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64

    def complete(self) -> None:
        if self.mlp_layer_types is None:
            self.mlp_layer_types = dense_first(self.first_k_dense_replace, self.num_hidden_layers)
        super().complete()


@dataclass(kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """GLM-5's fields: V3.2's, and which layers share the choice of the indexer before them."""

    model_type = "glm_moe_dsa"

    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    num_key_value_heads: int = 64
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int = 2048
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: int = 1
    topk_group: int = 1
    index_n_heads: int = 32
    indexer_types: list[str] | None = None

    def complete(self) -> None:
        if self.indexer_types is None:
            self.indexer_types = _indexer_types(
                self.num_hidden_layers,
                getattr(self, "index_topk_pattern", None),
                getattr(self, "index_topk_freq", 1),
                getattr(self, "index_skip_topk_offset", 2),
            )
        super().complete()


@dataclass(kw_only=True)
class Glm4MoeLiteConfig(LatentConfig):
    """GLM-4.7-Flash's fields."""

    model_type = "glm4_moe_lite"
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}

    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    num_key_value_heads: int = 20
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    rope_interleave: bool = True
    mlp_layer_types: list[str] | None = None
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_routed_experts: int = 64
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.8

    def complete(self) -> None:
        if self.mlp_layer_types is None:
            self.mlp_layer_types = dense_first(1, self.num_hidden_layers)
        super().complete()


def dense_first(count: int, num_layers: int) -> list[str]:
    """Each layer's type of MLP, if the first layers have one instead of experts."""
    return ["dense" if layer < count else "sparse" for layer in range(num_layers)]


def _indexer_types(
    num_layers: int, pattern: str | list[str] | None, every: int, offset: int
) -> list[str]:
    """Each layer's: from a pattern of F and S, or full in one of `every` layers."""
    if isinstance(pattern, str):
        return [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if pattern is not None:
        return list(pattern)
    return [
        "shared" if max(layer - offset + 1, 0) % max(every, 1) else "full"
        for layer in range(num_layers)
    ]
