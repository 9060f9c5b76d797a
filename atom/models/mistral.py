"""Mistral and Ministral: Llama whose layers may attend to a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
