"""Gemma 2: norms on both sides of attention and MLP, windows in turn, capped scores and logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.glm4 import Glm4DecoderLayer
from atom.models.layers.one_plus_norms import OnePlusNorms
from atom.models.layers.windows import window_of_type
from atom.models.llama import Activation, LlamaAttention, LlamaForCausalLM, LlamaMLP

# Its layers are GLM-4's by other names.
_MODULES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


class Gemma2Attention(LlamaAttention):
    @staticmethod
    def scale(config: PretrainedConfig) -> float:
        scale: float = config.query_pre_attn_scalar**-0.5
        return scale

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id)

    @staticmethod
    def softcap(config: PretrainedConfig) -> float | None:
        return cap_of(config, "attn_logit_softcapping")


class GemmaMLP(LlamaMLP):
    """`down(gelu(gate(x)) * up(x))`."""

    def resolve_activation(self, config: PretrainedConfig, context: LayerContext) -> Activation:
        expect_field(config, "hidden_activation", "gelu_pytorch_tanh")
        op: Activation
        op = context.ops.resolve("gelu_and_mul", context.dtype, size=self.down_proj.in_features)
        return op


class Gemma2DecoderLayer(Glm4DecoderLayer):
    attention_class = Gemma2Attention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return GemmaMLP(config, config.intermediate_size, context, prefix)


class GemmaForCausalLM(OnePlusNorms, LlamaForCausalLM):
    """What the families share: norms that multiply by 1 + weight, a scaled embedding."""

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        if config.use_bidirectional_attention:
            raise ConfigError(
                f"{config.model_type} with use_bidirectional_attention=True is not supported"
            )
        super().__init__(config, context, prefix)

    @staticmethod
    def embedding_scale(config: PretrainedConfig, context: LayerContext) -> float:
        """Rounded to the dtype, as it was when the model was trained."""
        return torch.tensor(config.hidden_size**0.5, dtype=context.dtype).item()

    @property
    def weight_mapping(self) -> WeightMapping:
        return replace(super().weight_mapping, modules=_MODULES)


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Source of names and computation: transformers' `gemma2`."""

    layer_class = Gemma2DecoderLayer

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        super().__init__(config, context, prefix)
        self._cap = cap_of(config, "final_logit_softcapping")
        self._softcap = context.ops.resolve("softcap", torch.float32)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden_states)
        if self._cap is not None:
            logits = self._softcap(logits, self._cap)
        return logits


def cap_of(config: PretrainedConfig, field: str) -> float | None:
    """The cap that a field says; None for none.

    Raises:
        ConfigError: when it is not positive.
    """
    cap: float | None = getattr(config, field)
    if cap is not None and cap <= 0:
        raise ConfigError(f"{config.model_type} with {field}={cap}: a cap is positive")
    return cap


def expect_field(config: PretrainedConfig, field: str, value: object) -> None:
    """Refuse a config with another value of a field."""
    found = getattr(config, field)
    if found != value:
        raise ConfigError(f"{config.model_type} with {field}={found!r} is not supported")
