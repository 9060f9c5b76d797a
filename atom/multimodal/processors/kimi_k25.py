"""Kimi-K2.5's images: as large as they are, within limits, padded to whole tokens.

Source of the arithmetic: the published processor, and transformers' `kimi_k25`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from atom.config import ConfigError
from atom.multimodal.items import ImageItem
from atom.multimodal.processors.base import channel_scale, whole_number

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDER = "<|media_pad|>"
_WHERE = "preprocessor_config.json"
_CHANNELS = 3


@dataclass(frozen=True)
class KimiImageProcessor:
    """Attributes:
    patch: pixels along a side of a patch.
    merge: patches along a side of a token.
    max_patches: of an image before it is padded.
    max_side: patches along a side.
    """

    placeholder_id: int
    patch: int
    merge: int
    max_patches: int
    max_side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    placeholder: str = PLACEHOLDER

    @classmethod
    def of(cls, settings: Mapping[str, Any], placeholder_id: int) -> KimiImageProcessor:
        """Args:
        settings: the file's, in the names of the published checkpoint or of transformers.

        Raises:
            ConfigError: for settings that are none.
        """
        own = settings.get("media_proc_cfg", settings)
        if not isinstance(own, dict):
            raise ConfigError(f"{_WHERE}: media_proc_cfg={own!r}, expected an object")
        if own.get("fixed_output_tokens") is not None:
            raise ConfigError(f"{_WHERE}: fixed_output_tokens is not supported; expected null")
        size = own.get("size") or {}
        side = size.get("max_height", 512) if isinstance(size, dict) else 512
        limits = {**own, "side": own.get("patch_limit_on_one_side", side)}
        mean, std = channel_scale(own, _WHERE)
        return cls(
            placeholder_id,
            whole_number(own, "patch_size", 14, _WHERE),
            whole_number(own, "merge_size", own.get("merge_kernel_size", 2), _WHERE),
            whole_number(own, "max_patches", own.get("in_patch_limit", 16384), _WHERE),
            whole_number(limits, "side", 512, _WHERE),
            mean,
            std,
        )

    def process(self, image: Image) -> ImageItem:
        """Patches [N, 3, patch, patch], row by row, of a grid of (rows, columns)."""
        from PIL.Image import Resampling

        width, height = self.fitting(image.width, image.height)
        if (width, height) != image.size:
            image = image.resize((width, height), Resampling.BICUBIC)
        step = self.merge * self.patch
        rows, columns = (-(-size // step) * self.merge for size in (height, width))
        padded = np.zeros((rows * self.patch, columns * self.patch, _CHANNELS), dtype=np.uint8)
        padded[:height, :width] = np.asarray(image)
        patches = padded.reshape(rows, self.patch, columns, self.patch, _CHANNELS)
        patches = patches.transpose(0, 2, 4, 1, 3).reshape(-1, _CHANNELS, self.patch, self.patch)
        count = rows * columns // self.merge**2
        tokens = [self.placeholder_id] * count
        return ImageItem.of(patches, (rows, columns), self.mean, self.std, tokens, [(0, count)])

    def fitting(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image of this size is made smaller to; never larger."""
        count = max(1, width // self.patch) * max(1, height // self.patch)
        longest = self.max_side * self.patch
        scale = min(1.0, math.sqrt(self.max_patches / count), longest / width, longest / height)
        return (
            min(max(1, int(width * scale)), longest),
            min(max(1, int(height * scale)), longest),
        )
