"""Qwen2.5-VL: Qwen2 with a vision tower, whose tokens rotate by time, row and column."""

from __future__ import annotations

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import MRotaryEmbedding, RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.text_model import TextModel
from atom.models.llama import head_size
from atom.models.qwen2 import Qwen2ForCausalLM
from atom.models.vision.encoder import ImageEncoder
from atom.models.vision.qwen2_5_vl import Qwen25ImageEncoder

_SECTIONS = (16, 24, 24)


class Qwen25VLForConditionalGeneration(TextModel, Qwen2ForCausalLM):
    """The checkpoint's text network and, with images, its `visual.*`."""

    prefix = ""
    # The names that transformers saves, and, where they differ, the published ones.
    text_renames = (("model.language_model.", "model."),)
    vision_renames = (("model.visual.", "vision."), ("visual.", "vision."))
    vision_weights = (r"(model\.)?visual\..*",)

    def create_encoder(
        self, config: PretrainedConfig, context: LayerContext
    ) -> ImageEncoder | None:
        return Qwen25ImageEncoder(config, context)

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        sections = config.rope_parameters.get("mrope_section", _SECTIONS)
        return MRotaryEmbedding(config, head_size(config), context, sections, mixed=False)
