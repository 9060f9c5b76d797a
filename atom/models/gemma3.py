"""Gemma 3 (text): norms on both sides of attention and MLP, windows, a rotation for each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from atom.config import ConfigError
from atom.model_ops.activation import GeluAndMul
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm, Sublayer
from atom.model_ops.rotary import RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.glm4 import Glm4DecoderLayer
from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaForCausalLM, LlamaMLP, head_size
from atom.models.qwen3 import Qwen3Attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Its layers are GLM-4's by other names.
_MODULES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


class Gemma3Attention(Qwen3Attention):
    @staticmethod
    def scale(config: PretrainedConfig) -> float:
        scale: float = config.query_pre_attn_scalar**-0.5
        return scale

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id)


class Gemma3MLP(LlamaMLP):
    """`down(gelu(gate(x)) * up(x))`."""

    def create_activation(self, config: PretrainedConfig, context: LayerContext) -> nn.Module:
        _expect(config, "hidden_activation", "gelu_pytorch_tanh")
        return GeluAndMul(self.down_proj.in_features, context)


class Gemma3DecoderLayer(Glm4DecoderLayer):
    attention_class = Gemma3Attention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return Gemma3MLP(config, config.intermediate_size, context, prefix)


class Gemma3ForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `gemma3`."""

    layer_class = Gemma3DecoderLayer

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            _expect(config, field, None)
        _expect(config, "use_bidirectional_attention", False)
        super().__init__(config, context, prefix)

    @staticmethod
    def embedding_scale(config: PretrainedConfig, context: LayerContext) -> float:
        """Rounded to the dtype, as it was when the model was trained."""
        return torch.tensor(config.hidden_size**0.5, dtype=context.dtype).item()

    def create_rotaries(
        self, config: PretrainedConfig, context: LayerContext
    ) -> Sequence[RotaryEmbedding]:
        """One for each type of layer."""
        by_type = {}
        for kind in set(config.layer_types):
            of_type = copy.copy(config)
            of_type.rope_parameters = config.rope_parameters[kind]
            by_type[kind] = RotaryEmbedding(of_type, head_size(config), context)
        return [by_type[kind] for kind in config.layer_types]

    @property
    def weight_mapping(self) -> WeightMapping:
        return replace(super().weight_mapping, modules=_MODULES)

    @property
    def dequantised_bytes(self) -> int:
        return 0

    def process_after_loading(self) -> None:
        """Norms multiply by 1 + weight."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.data += 1


def _expect(config: PretrainedConfig, field: str, value: object) -> None:
    """Refuse a config with another value of a field."""
    found = getattr(config, field)
    if found != value:
        raise ConfigError(f"{config.model_type} with {field}={found!r} is not supported")
