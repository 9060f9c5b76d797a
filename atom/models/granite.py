"""Granite: Llama with factors on embedding, attention, layers' outputs and logits."""

from __future__ import annotations

import torch

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    has_mlp_bias,
)


class GraniteAttention(LlamaAttention):
    """Its output is multiplied before it is added to the residual."""

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        self._factor: float = config.residual_multiplier
        self._scale = context.ops.resolve("scale", context.dtype)

    @staticmethod
    def scale(config: PretrainedConfig) -> float:
        return float(config.attention_multiplier)

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = self._scale(super().forward(x, inputs), self._factor)
        return out


class GraniteMLP(LlamaMLP):
    """The same of its output."""

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str) -> None:
        super().__init__(
            config, config.intermediate_size, context, prefix, bias=has_mlp_bias(config)
        )
        self._factor: float = config.residual_multiplier
        self._scale = context.ops.resolve("scale", context.dtype)

    def forward(self, x: Rows) -> torch.Tensor:
        out: torch.Tensor = self._scale(super().forward(x), self._factor)
        return out


class GraniteDecoderLayer(LlamaDecoderLayer):
    attention_class = GraniteAttention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return GraniteMLP(config, context, prefix)


class GraniteForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `granite`."""

    layer_class = GraniteDecoderLayer

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        super().__init__(config, context, prefix)
        self._factor: float = 1 / config.logits_scaling
        self._scale = context.ops.resolve("scale", torch.float32)

    @staticmethod
    def embedding_scale(config: PretrainedConfig, context: LayerContext) -> float:
        return float(config.embedding_multiplier)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._scale(super().compute_logits(hidden_states), self._factor)
        return logits
