"""The text models of checkpoints that also read images."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import ClassVar

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import LlamaForCausalLM
from atom.models.vision.encoder import ImageEncoder

logger = logging.getLogger(__name__)


class TextModel(LlamaForCausalLM):
    """A checkpoint's text model and, if images are read, its encoder of them as `vision`.

    A base, before the class of the text model.

    Attributes:
        prefix: of the text model in the checkpoint.
        text_renames: from its names there to ours.
        vision_renames: likewise of the encoder, to those below `vision`.
        vision_weights: patterns of its names in the checkpoint, which are skipped without it.
    """

    prefix: ClassVar[str] = "language_model."
    text_renames: ClassVar[tuple[tuple[str, str], ...]] = (("language_model.", ""),)
    vision_renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    vision_weights: ClassVar[tuple[str, ...]] = (r"vision_tower\..*", r"multi_modal_projector\..*")

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__(self.text_config(config), context, self.prefix)
        self.vision = self.create_encoder(config, context) if context.images else None
        if self.vision is None and context.device.type != "meta":  # not when it is only sketched
            logger.info("%s runs as a text model: vision weights are skipped", config.model_type)

    def text_config(self, config: PretrainedConfig) -> PretrainedConfig:
        """That of the text model."""
        return config.get_text_config()

    def create_encoder(
        self, config: PretrainedConfig, context: LayerContext
    ) -> ImageEncoder | None:
        """The encoder of images; None where there is none of the family."""
        return None

    @property
    def image_encoder(self) -> ImageEncoder | None:
        return self.vision

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        # Patterns match names in the checkpoint, before renaming.
        head = (rf"{self.prefix}lm_head\.weight",) if self.tied else ()
        skipped = self.vision_weights if self.vision is None else ()
        return replace(
            mapping,
            renames=(*self.text_renames, *self.vision_renames, *mapping.renames),
            ignored=(*mapping.ignored, *head, *skipped),
        )
