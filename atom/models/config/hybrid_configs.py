"""Configurations of models with recurrent states that have a model class here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from atom.config import ConfigError
from atom.models.config.latent_configs import LatentConfig, dense_first
from atom.models.config.model_config import ModelConfig


@dataclass(kw_only=True)
class KimiLinearConfig(LatentConfig):
    """Kimi-Linear's fields, by the names that DeepSeek-V3 has for them.

    `linear_attn_config` has the sizes of linear attention, and lists of layers, counted from 1.
    """

    model_type = "kimi_linear"
    aliases: ClassVar[Mapping[str, str]] = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = None
    v_head_dim: int | None = 128
    n_routed_experts: int = 256
    n_group: int = 1
    topk_group: int | None = 1
    norm_topk_prob: bool = True
    num_experts_per_tok: int | None = 8
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: int = 1
    mlp_layer_types: list[str] | None = None
    layer_types: list[str] | None = None
    linear_attn_config: dict[str, Any] | None = None
    linear_head_dim: int = 128
    linear_num_heads: int = 32
    linear_conv_kernel_dim: int = 4

    def complete(self) -> None:
        inner = self.linear_attn_config or {}
        self.linear_head_dim = inner.get("head_dim", self.linear_head_dim)
        self.linear_num_heads = inner.get("num_heads", self.linear_num_heads)
        self.linear_conv_kernel_dim = inner.get(
            "short_conv_kernel_size", self.linear_conv_kernel_dim
        )
        if self.layer_types is None:
            self.layer_types = self._listed_types(inner)
        if self.mlp_layer_types is None:
            self.mlp_layer_types = dense_first(self.first_k_dense_replace, self.num_hidden_layers)
        super().complete()

    def _listed_types(self, inner: Mapping[str, Any]) -> list[str]:
        """Raises:
        ConfigError: when the lists do not have each layer once.
        """
        full, linear = inner.get("full_attn_layers"), inner.get("kda_layers")
        layers = range(1, self.num_hidden_layers + 1)
        if full is None and linear is None:  # transformers' default
            return [
                "full_attention" if i % 4 == 0 and i else "linear_attention"
                for i in range(self.num_hidden_layers)
            ]
        if not isinstance(full, list) or not isinstance(linear, list):
            raise ConfigError("linear_attn_config should list full_attn_layers and kda_layers")
        if sorted([*full, *linear]) != [*layers]:
            raise ConfigError(
                f"linear_attn_config should name each of the layers 1 to {self.num_hidden_layers} "
                f"once in full_attn_layers or kda_layers"
            )
        return ["full_attention" if i in full else "linear_attention" for i in layers]


@dataclass(kw_only=True)
class KimiK3Config(ModelConfig):
    """Kimi-K3's fields: those of its text model have Kimi-Linear's names, and some of their own."""

    model_type = "kimi_k3"

    text_config: dict[str, Any] | None = None
    tie_word_embeddings: bool = False

    def complete(self) -> None:
        """Raises:
        ConfigError: without a text model, or without what Kimi-Linear has another default of.
        """
        text = self.text_config
        if text is None or text.get("model_type") != "kimi_linear":
            raise ConfigError("kimi_k3 should have a text_config of model_type kimi_linear")
        if text.get("routed_scaling_factor") is None:
            raise ConfigError("kimi_k3 should state routed_scaling_factor in its text_config")
        self._text = KimiLinearConfig.from_dict(text)
        super().complete()

    def get_text_config(self) -> ModelConfig:
        return self._text

    def to_dict(self) -> dict[str, Any]:
        made = super().to_dict()
        del made["_text"]
        return made
