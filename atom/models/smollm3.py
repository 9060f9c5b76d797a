"""SmolLM3: Llama with some layers that do not rotate, and windows on some."""

from __future__ import annotations

from collections.abc import Sequence

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import NoRotation, RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, head_size


class SmolLM3Attention(LlamaAttention):
    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id) if config.use_sliding_window else None


class SmolLM3DecoderLayer(LlamaDecoderLayer):
    attention_class = SmolLM3Attention


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `smollm3`."""

    layer_class = SmolLM3DecoderLayer

    def create_rotaries(
        self, config: PretrainedConfig, context: LayerContext
    ) -> Sequence[RotaryEmbedding]:
        """An entry of `no_rope_layers` is 1 for a layer that rotates."""
        rotary = self.create_rotary(config, context)
        still = NoRotation(config, head_size(config), context)
        return [rotary if rotates else still for rotates in config.no_rope_layers]
