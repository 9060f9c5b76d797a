"""The text models of checkpoints that also read images."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

_TEXT = "language_model."
_VISION = (r"vision_tower\..*", r"multi_modal_projector\..*")


class TextModel(LlamaForCausalLM):
    """The checkpoint's `language_model.*`; vision weights are not loaded.

    A base, before the class of the text model.
    """

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        super().__init__(config.get_text_config(), context, _TEXT)
        if context.device.type != "meta":  # not when it is only sketched
            logger.info("%s runs as a text model: vision weights are skipped", config.model_type)

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        # Patterns match names in the checkpoint, before renaming.
        head = (rf"{_TEXT}lm_head\.weight",) if self.tied else ()
        return replace(
            mapping,
            renames=((_TEXT, ""), *mapping.renames),
            ignored=(*mapping.ignored, *head, *_VISION),
        )
