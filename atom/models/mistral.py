"""Mistral and Ministral: Llama whose layers may have windows, or scale queries by position."""

from __future__ import annotations

from typing import ClassVar

import torch

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.text_model import TextModel
from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, head_size


class MistralAttention(LlamaAttention):
    """Without biases; all layers have the same window, or none."""

    @staticmethod
    def has_qkv_bias(config: PretrainedConfig) -> bool:
        return False

    @staticmethod
    def has_output_bias(config: PretrainedConfig) -> bool:
        return False

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        window: int | None = config.sliding_window
        return window


class MistralDecoderLayer(LlamaDecoderLayer):
    attention_class = MistralAttention


class MistralForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `mistral`."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = MistralDecoderLayer


class MinistralAttention(MistralAttention):
    """Layers have windows as `layer_types` says."""

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id)


class MinistralDecoderLayer(LlamaDecoderLayer):
    attention_class = MinistralAttention


class MinistralForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `ministral`."""

    layer_class = MinistralDecoderLayer


class PlacedRotary(RotaryEmbedding):
    """With the factor of queries at each position p: 1 + beta ln(1 + floor(p / original context)).

    Attributes:
        query_factors: [positions] float32.

    Raises:
        ConfigError: without beta (`llama_4_scaling_beta`) or the original context.
    """

    query_factors: torch.Tensor

    def __init__(self, config: PretrainedConfig, head_dim: int, context: LayerContext) -> None:
        super().__init__(config, head_dim, context)
        names = ("llama_4_scaling_beta", "original_max_position_embeddings")
        given = [config.rope_parameters.get(name) for name in names]
        if None in given:
            raise ConfigError(
                f"{config.model_type} without {names[given.index(None)]} in rope_parameters: "
                f"queries are scaled by it"
            )
        beta, original = given
        factors = torch.ones(context.max_model_len, device=context.device)
        if context.device.type != "meta":
            positions = torch.arange(context.max_model_len, device=context.device)
            factors += beta * torch.log1p(torch.floor(positions / original))
        self.register_buffer("query_factors", factors, persistent=False)


class Ministral3Attention(MistralAttention):
    """Its queries grow with their position."""

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        self._scale_by_position = context.ops.resolve("scale_by_position", context.dtype)

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        """A rotation keeps factors, so they may come before it."""
        if not isinstance(inputs.rotary, PlacedRotary):
            return super().forward(x, inputs)
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        q = self._scale_by_position(q, inputs.positions, inputs.rotary.query_factors)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, inputs))
        return out


class Ministral3DecoderLayer(LlamaDecoderLayer):
    attention_class = Ministral3Attention


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `ministral3`."""

    layer_class = Ministral3DecoderLayer

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        return PlacedRotary(config, head_size(config), context)


class Mistral3ForConditionalGeneration(TextModel, Ministral3ForCausalLM):
    """The text model of Mistral Small 3.1 and later, and of Ministral 3, which scales queries.

    Source of names: transformers' `mistral3`.

    Raises:
        ConfigError: for another text model.
    """

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        if config.model_type == "ministral3":
            return super().create_rotary(config, context)
        if config.model_type != "mistral":
            raise ConfigError(
                f"mistral3 with a text_config of type {config.model_type!r} is not supported; "
                f"supported are mistral and ministral3"
            )
        return RotaryEmbedding(config, head_size(config), context)
