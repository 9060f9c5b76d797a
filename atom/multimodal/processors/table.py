"""Which processor a model has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom.config import ConfigError, ModelOptions
from atom.messages import ModelFacts
from atom.multimodal.processors.base import (
    ImageProcessor,
    VideoProcessor,
    processor_settings,
    video_settings,
)
from atom.multimodal.processors.idefics3 import Idefics3ImageProcessor
from atom.multimodal.processors.kimi_k25 import KimiImageProcessor

if TYPE_CHECKING:
    from atom.model_loader.source import ModelSource

# By the types of models.
_KIMI = ("kimi_k25",)
_IDEFICS = ("idefics3", "smolvlm")
_QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def may_see(model: ModelFacts, options: ModelOptions) -> bool:
    """Whether a model has processors, or options say something of them."""
    known = model.model_type in (*_KIMI, *_IDEFICS, *_QWEN)
    return known or model.sees or bool(options.limit_mm_per_prompt)


def create_image_processor(
    source: ModelSource, options: ModelOptions, tokenizer: Any
) -> ImageProcessor | None:
    """The image processor of a model; None where it reads no images, or is loaded to read none.

    Raises:
        ConfigError: when the checkpoint's settings are not supported, or images are limited of a
            model that reads none.
    """
    config, by = source.hf_config, source.implementation
    if by is not None and by.sees:
        if options.max_images == 0:
            return None
        from atom.multimodal.processors.by_transformers import TransformersImageProcessor

        return TransformersImageProcessor.of(source.path)
    if config.model_type not in (*_KIMI, *_IDEFICS, *_QWEN):
        if options.limit_mm_per_prompt and any(options.limit_mm_per_prompt.values()):
            raise ConfigError(f"limit_mm_per_prompt: {source.name} reads no images; leave it out")
        return None
    if config.model_type not in _QWEN and (options.limit_mm_per_prompt or {}).get("video"):
        raise ConfigError(f"limit_mm_per_prompt: {source.name} reads no videos; leave them out")
    if not options.reads_images:
        return None
    settings = processor_settings(source.path)
    if config.model_type in _IDEFICS:
        return Idefics3ImageProcessor.of(settings, config, tokenizer)
    if config.model_type in _QWEN:
        from atom.multimodal.processors.qwen_vl import QwenImageProcessor

        return QwenImageProcessor.of(settings, config)
    placeholder = getattr(config, "media_placeholder_token_id", config.image_token_id)
    return KimiImageProcessor.of(settings, int(placeholder))


def create_video_processor(
    source: ModelSource, options: ModelOptions, tokenizer: Any
) -> VideoProcessor | None:
    """The video processor of a model; None where it reads no videos, or is loaded to read none.

    Raises:
        ConfigError: when the checkpoint's settings are not supported.
    """
    config = source.hf_config
    if config.model_type not in _QWEN or not options.max_videos:
        return None
    from atom.multimodal.processors.qwen_vl import QwenVideoProcessor

    return QwenVideoProcessor.of(video_settings(source.path), config, tokenizer)
