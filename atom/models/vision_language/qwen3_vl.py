"""Qwen3-VL: Qwen3 or Qwen3-MoE with a vision tower, whose tokens rotate by time, row and column."""

from __future__ import annotations

from typing import ClassVar

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.rotary import MRotaryEmbedding, RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.moe_block import SoftmaxMoE
from atom.models.layers.text_model import TextModel
from atom.models.llama import LlamaDecoderLayer, head_size
from atom.models.moe.qwen3_moe import has_experts
from atom.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer
from atom.models.vision.encoder import ImageEncoder
from atom.models.vision.qwen3_vl import Qwen3ImageEncoder

_SECTIONS = (24, 20, 20)


class Qwen3VLAttention(Qwen3Attention):
    """Has no window, and its configuration no field for one."""

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return None


class Qwen3VLDecoderLayer(Qwen3DecoderLayer):
    attention_class = Qwen3VLAttention


class Qwen3VLForConditionalGeneration(TextModel):
    """The checkpoint's `model.language_model.*` and, with images, its `model.visual.*`."""

    layer_class: ClassVar[type[LlamaDecoderLayer]] = Qwen3VLDecoderLayer
    trunk = "model.language_model"
    prefix = ""
    text_renames = (("model.language_model.", "model."),)
    vision_renames = (("model.visual.", "vision."),)
    vision_weights = (r"model\.visual\..*",)

    def create_encoder(
        self, config: PretrainedConfig, context: LayerContext
    ) -> ImageEncoder | None:
        return Qwen3ImageEncoder(config, context)

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        sections = config.rope_parameters.get("mrope_section", _SECTIONS)
        return MRotaryEmbedding(config, head_size(config), context, sections, mixed=True)


class Qwen3VLMoE(SoftmaxMoE):
    """Published with inputs before outputs; transformers saves them the other way round."""

    turned = True


class Qwen3VLMoeDecoderLayer(LlamaDecoderLayer):
    """As of Qwen3-MoE; always renormalises."""

    attention_class = Qwen3VLAttention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if not has_experts(config, layer_id):
            return super().create_mlp(config, layer_id, context, prefix)
        sizes = config.num_experts, config.moe_intermediate_size
        return Qwen3VLMoE(config, *sizes, True, context, prefix)


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Source of names and computation: transformers' `qwen3_vl_moe`."""

    layer_class = Qwen3VLMoeDecoderLayer
