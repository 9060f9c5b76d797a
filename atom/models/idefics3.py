"""Idefics3 and SmolVLM: Llama with a vision tower."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.llama import LlamaForCausalLM
from atom.models.vision.encoder import ImageEncoder
from atom.models.vision.idefics3 import Idefics3ImageEncoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RENAMES = (
    ("model.text_model.", "model."),
    ("model.vision_model.", "vision.vision_model."),
    ("model.connector.", "vision.connector."),
)
_UNREAD = (r"model\.vision_model\..*", r"model\.connector\..*")


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """The checkpoint's `model.text_model.*` and, with images, its tower and connector."""

    trunk = "model.text_model"

    def __init__(self, config: PretrainedConfig, context: LayerContext) -> None:
        text = copy.copy(config.get_text_config())
        text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
        super().__init__(text, context)
        self.vision = Idefics3ImageEncoder(config, context) if context.images else None

    @property
    def image_encoder(self) -> ImageEncoder | None:
        return self.vision

    @property
    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping
        unread = _UNREAD if self.vision is None else ()
        return replace(
            mapping,
            renames=(*_RENAMES, *mapping.renames),
            ignored=(*mapping.ignored, *unread),
        )
