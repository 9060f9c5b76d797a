"""Images of Qwen2.5-VL: resized to whole tokens, and to a number of pixels between two limits.

Source of the arithmetic: transformers' `qwen2_vl`, its processor for Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from atom.config import ConfigError
from atom.messages import MRopeGrid
from atom.multimodal.items import ImageItem
from atom.multimodal.policy import MediaError
from atom.multimodal.processors.base import channel_scale, whole_number

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDER = "<|image_pad|>"
_WHERE = "preprocessor_config.json"
_BICUBIC = 3
_MOST_RATIO = 200
# What settings are where a file does not say them.
_DEFAULTS = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True)
class QwenImageProcessor:
    """Attributes:
    patch: pixels along a side of a patch.
    merge: patches along a side of a token.
    least, most: pixels of an image.
    """

    placeholder_id: int
    patch: int
    merge: int
    least: int
    most: int
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    placeholder: str = PLACEHOLDER

    @classmethod
    def of(cls, settings: Mapping[str, Any], config: Any) -> QwenImageProcessor:
        """Args:
        config: the model's.

        Raises:
            ConfigError: for settings that are none, or do not go with the model.
        """
        own = {**_DEFAULTS, **settings}
        if not own.get("do_resize", True):
            raise ConfigError(f"{_WHERE}: do_resize=false is not supported")
        vision = config.vision_config
        for name, needed in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.spatial_merge_size),
            ("temporal_patch_size", vision.temporal_patch_size),
        ):
            if own.get(name, needed) != needed:
                raise ConfigError(f"{_WHERE}: {name}={own[name]!r}, and the model has {needed}")
        size = own.get("size")
        if not isinstance(size, dict):
            size = {}
        limits = {
            "min_pixels": own.get("min_pixels") or size.get("shortest_edge") or _LEAST_PIXELS,
            "max_pixels": own.get("max_pixels") or size.get("longest_edge") or _MOST_PIXELS,
        }
        mean, std = channel_scale(own, _WHERE)
        return cls(
            int(config.image_token_id),
            int(vision.patch_size),
            int(vision.spatial_merge_size),
            whole_number(limits, "min_pixels", _LEAST_PIXELS, _WHERE),
            whole_number(limits, "max_pixels", _MOST_PIXELS, _WHERE),
            whole_number(own, "resample", _BICUBIC, _WHERE),
            mean,
            std,
        )

    def process(self, image: Image) -> ImageItem:
        """Patches [N, 1, 3, patch, patch] of a grid of (1, rows, columns), a token's patches
        together.

        Raises:
            MediaError: for an image that is much longer than wide, or the other way round.
        """
        from PIL.Image import Resampling

        width, height = fitting(
            image.width, image.height, self.patch * self.merge, self.least, self.most
        )
        if (width, height) != image.size:
            image = image.resize((width, height), Resampling(self.resample))
        pixels = cut(np.asarray(image)[None], self.patch, self.merge)
        rows, columns = height // self.patch, width // self.patch
        places = MRopeGrid((0,), rows // self.merge, columns // self.merge)
        count = places.rows * places.columns
        tokens = [self.placeholder_id] * count
        where = tokens, [(0, count)]
        return ImageItem.of(pixels, (1, rows, columns), self.mean, self.std, *where, places)


def fitting(width: int, height: int, step: int, least: int, most: int) -> tuple[int, int]:
    """The width and height, multiples of `step`, of about the same shape, with a number of pixels
    between both limits, that an image of this size is resized to.

    Raises:
        MediaError: where one side is more than 200 times the other.
    """
    if max(width, height) / min(width, height) > _MOST_RATIO:
        raise MediaError(
            f"an image of {width} by {height} pixels: this model takes none with a side more than "
            f"{_MOST_RATIO} times the other"
        )
    wide, high = (round(side / step) * step for side in (width, height))
    if wide * high > most:
        shrink = math.sqrt(height * width / most)
        wide, high = (
            max(step, math.floor(side / shrink / step) * step) for side in (width, height)
        )
    elif wide * high < least:
        grow = math.sqrt(least / (height * width))
        wide, high = (math.ceil(side * grow / step) * step for side in (width, height))
    return wide, high


def cut(frames: npt.NDArray[np.uint8], patch: int, merge: int) -> npt.NDArray[np.uint8]:
    """Frames [n, height, width, 3] that are one patch deep -> [N, n, 3, patch, patch], row by row,
    those of a token together.
    """
    count, height, width, channels = frames.shape
    step = patch * merge
    own = frames.reshape(count, height // step, merge, patch, width // step, merge, patch, channels)
    patches: npt.NDArray[np.uint8] = own.transpose(1, 4, 2, 5, 0, 7, 3, 6)
    return patches.reshape(-1, count, channels, patch, patch)
