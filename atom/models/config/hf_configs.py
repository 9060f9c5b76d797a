"""Configurations of the model types that have a model class here.

`AutoConfig` would read the same fields, but importing transformers takes longer than all else that
a start does besides importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from atom.models.config.hybrid_configs import KimiK3Config, KimiLinearConfig
from atom.models.config.latent_configs import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    KimiK2Config,
)
from atom.models.config.model_config import ModelConfig


@dataclass(kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama's fields; `head_dim` and `num_key_value_heads` follow from others when absent."""

    model_type = "llama"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def complete(self) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().complete()


@dataclass(kw_only=True)
class Qwen2Config(ModelConfig):
    """Qwen2's fields; layers from `max_window_layers` on have a window, if one is used."""

    model_type = "qwen2"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def complete(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            first = (
                self.num_hidden_layers if self.sliding_window is None else self.max_window_layers
            )
            self.layer_types = [
                "full_attention" if layer < first else "sliding_attention"
                for layer in range(self.num_hidden_layers)
            ]
        super().complete()


@dataclass(kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen3's fields: Qwen2's, with a size of heads and biases that are optional."""

    model_type = "qwen3"

    head_dim: int = 128
    attention_bias: bool = False


@dataclass(kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """Qwen3-MoE's fields; published files also say `head_dim`."""

    model_type = "qwen3_moe"
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_experts: int = 128
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None

    def complete(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.mlp_only_layers is None:
            self.mlp_only_layers = []
        super().complete()


@dataclass(kw_only=True)
class MistralConfig(ModelConfig):
    """Mistral's fields; without the field `sliding_window` there is one of 4,096 tokens."""

    model_type = "mistral"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = 4096

    def complete(self) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().complete()


@dataclass(kw_only=True)
class Glm4MoeConfig(ModelConfig):
    """GLM-4.5's fields; half of each head is rotated, if nothing else is said."""

    model_type = "glm4_moe"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    use_qk_norm: bool = False
    first_k_dense_replace: int = 1
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 1

    @classmethod
    def rotate_partly(cls, given: dict[str, Any]) -> None:
        given.setdefault("partial_rotary_factor", 0.5)


@dataclass(kw_only=True)
class MiniMaxM2Config(ModelConfig):
    """MiniMax-M2's fields; published files say by `rotary_dim` how much of a head is rotated."""

    model_type = "minimax_m2"
    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    default_rope_theta = 5_000_000.0

    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 196608
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    num_experts_per_tok: int = 8
    num_local_experts: int = 256

    @classmethod
    def rotate_partly(cls, given: dict[str, Any]) -> None:
        if given.get("rotary_dim") is not None:
            size = given.get("head_dim", cls.head_dim)
            given.setdefault("partial_rotary_factor", given["rotary_dim"] / size)


_CONFIGS: dict[str, type[ModelConfig]] = {
    config.model_type: config
    for config in (
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
        MistralConfig,
        DeepseekV2Config,
        DeepseekV3Config,
        KimiK2Config,
        DeepseekV32Config,
        GlmMoeDsaConfig,
        Glm4MoeConfig,
        Glm4MoeLiteConfig,
        MiniMaxM2Config,
        KimiLinearConfig,
        KimiK3Config,
    )
}


def is_built_in(model_type: object) -> bool:
    """Whether a configuration of this type is read without transformers."""
    return isinstance(model_type, str) and model_type in _CONFIGS


def built_in_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a `config.json` whose type `is_built_in`.

    Raises:
        TypeError: when a field has the wrong type.
    """
    return _CONFIGS[raw["model_type"]].from_dict(raw)
