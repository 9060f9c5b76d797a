"""Kimi-K2.5: DeepSeek-V3 as text model, with a vision tower."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.deepseek_v2 import DeepseekV3ForCausalLM
from atom.models.vision.encoder import ImageEncoder
from atom.models.vision.kimi_k25 import KimiImageEncoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_TEXT = "language_model."
# The names of the checkpoint, and, where they differ, those that transformers saves.
_BLOCKS = ("language_model.model.blocks.", "model.layers.")
_VISION = (
    ("vision_tower.encoder.patch_embed.", "vision.vision_tower.patch_embed."),
    ("vision_tower.", "vision.vision_tower."),
    ("model.mm_projector.", "vision.mm_projector."),
    ("mm_projector.", "vision.mm_projector."),
)
_UNREAD = (r"vision_tower\..*", r"(model\.)?mm_projector\..*")


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """The checkpoint's `language_model.*` and, with images, its vision weights."""

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__(config.get_text_config(), context, _TEXT)
        self.vision = KimiImageEncoder(config, context) if context.images else None
        if self.vision is None and context.device.type != "meta":  # not when it is only sketched
            logger.info("%s runs as a text model: vision weights are skipped", config.model_type)

    @property
    def image_encoder(self) -> ImageEncoder | None:
        return self.vision

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        # Patterns match names in the checkpoint, before renaming.
        head = (rf"{_TEXT}lm_head\.weight",) if self.tied else ()
        unread = _UNREAD if self.vision is None else ()
        return replace(
            mapping,
            renames=(_BLOCKS, (_TEXT, ""), *_VISION, *mapping.renames),
            ignored=(*mapping.ignored, *head, *unread),
        )
