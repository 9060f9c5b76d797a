"""Kimi-K2.5: DeepSeek-V3 as text model, with a vision tower."""

from __future__ import annotations

from atom.model_ops.layer_context import LayerContext
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.text_model import TextModel
from atom.models.moe.deepseek_v2 import DeepseekV3ForCausalLM
from atom.models.vision.encoder import ImageEncoder
from atom.models.vision.kimi_k25 import KimiImageEncoder


class KimiK25ForConditionalGeneration(TextModel, DeepseekV3ForCausalLM):
    """The checkpoint's `language_model.*` and, with images, its vision weights."""

    # The names of the checkpoint, and, where they differ, those that transformers saves.
    text_renames = (("language_model.model.blocks.", "model.layers."), ("language_model.", ""))
    vision_renames = (
        ("vision_tower.encoder.patch_embed.", "vision.vision_tower.patch_embed."),
        ("vision_tower.", "vision.vision_tower."),
        ("model.mm_projector.", "vision.mm_projector."),
        ("mm_projector.", "vision.mm_projector."),
    )
    vision_weights = (r"vision_tower\..*", r"(model\.)?mm_projector\..*")

    def create_encoder(
        self, config: PretrainedConfig, context: LayerContext
    ) -> ImageEncoder | None:
        return KimiImageEncoder(config, context)
