"""Idefics3 and SmolVLM: Llama with a vision tower."""

from __future__ import annotations

import copy

from atom.model_ops.layer_context import LayerContext
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.text_model import TextModel
from atom.models.vision.encoder import ImageEncoder
from atom.models.vision.idefics3 import Idefics3ImageEncoder


class Idefics3ForConditionalGeneration(TextModel):
    """The checkpoint's `model.text_model.*` and, with images, its tower and connector."""

    trunk = "model.text_model"
    prefix = ""
    text_renames = (("model.text_model.", "model."),)
    vision_renames = (
        ("model.vision_model.", "vision.vision_model."),
        ("model.connector.", "vision.connector."),
    )
    vision_weights = (r"model\.vision_model\..*", r"model\.connector\..*")

    def text_config(self, config: PretrainedConfig) -> PretrainedConfig:
        text = copy.copy(config.get_text_config())
        text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
        return text

    def create_encoder(
        self, config: PretrainedConfig, context: LayerContext
    ) -> ImageEncoder | None:
        return Idefics3ImageEncoder(config, context)
