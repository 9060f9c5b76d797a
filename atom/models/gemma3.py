"""Gemma 3 (text): Gemma 2 without caps, with norms of queries and keys, a rotation a layer type."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.gemma2 import (
    Gemma2Attention,
    Gemma2DecoderLayer,
    GemmaForCausalLM,
    expect_field,
)
from atom.models.layers.text_model import TextModel
from atom.models.llama import head_size
from atom.models.qwen3 import Qwen3Attention


class Gemma3Attention(Qwen3Attention, Gemma2Attention):
    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return Gemma2Attention.sliding_window(config, layer_id)


class Gemma3DecoderLayer(Gemma2DecoderLayer):
    attention_class = Gemma3Attention


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Source of names and computation: transformers' `gemma3`."""

    layer_class = Gemma3DecoderLayer

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            expect_field(config, field, None)
        super().__init__(config, context, prefix)

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


class Gemma3ForConditionalGeneration(TextModel, Gemma3ForCausalLM):
    """The text model of Gemma 3's larger sizes. Source of names: transformers' `gemma3`."""
