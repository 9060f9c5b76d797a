"""Models that see and watch: a scripted one, and a tiny checkpoint with how it is served."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
from multimodal import vision_checkpoints
from PIL.Image import Image
from transformers import PreTrainedTokenizerFast

from atom.multimodal.items import ImageItem, Video

PLACEHOLDER, FILM = "<|picture|>", "<|film|>"
SCRIPTED_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|picture|>{% elif part.type == 'video' %}<|film|>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
)


def scripted_tokenizer(byte_level_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """With the placeholders of images and videos."""
    tokenizer = copy.deepcopy(byte_level_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [PLACEHOLDER, FILM]})
    return tokenizer


class Columns:
    """A processor that makes a token of each column of pixels."""

    placeholder = PLACEHOLDER

    def __init__(self, placeholder_id: int) -> None:
        self.placeholder_id = placeholder_id
        self.sizes: list[tuple[int, int]] = []

    def process(self, image: Image) -> ImageItem:
        self.sizes.append(image.size)
        pixels = np.asarray(image)[None].transpose(0, 3, 1, 2)
        tokens = [self.placeholder_id] * image.width
        scale = (0.0, 0.0, 0.0), (255.0, 255.0, 255.0)
        return ImageItem.of(pixels, image.size, *scale, tokens, [(0, image.width)])


class Films:
    """A processor that makes a token of each frame."""

    def __init__(self, placeholder_id: int) -> None:
        self.placeholder_id = placeholder_id
        self.videos: list[Video] = []

    def process(self, video: Video) -> ImageItem:
        self.videos.append(video)
        pixels = np.stack([np.asarray(frame) for frame in video.frames]).transpose(0, 3, 1, 2)
        count, scale = len(video.frames), ((0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
        tokens = [self.placeholder_id] * count
        return ImageItem.of(pixels, (count,), *scale, tokens, [(0, count)], is_video=True)


TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
)
SERVER_FLAGS = (
    *("--dtype", "float32", "--block-size", "4", "--max-model-len", "160"),
    *("--served-model-name", "model", "--limit-mm-per-prompt", "image=3,video=2"),
)


def write_checkpoint(folder: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(byte_level_tokenizer)
    checkpoint = vision_checkpoints.qwen_vl(folder, tokenizer, "qwen3_vl")
    markers = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    assert tokenizer.convert_tokens_to_ids(markers[1]) == checkpoint.placeholder
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
