"""Images and videos of Qwen's models: resized to whole tokens, and to a number of pixels between
two limits.

Source of the arithmetic: transformers' `qwen2_vl`, its processor for Pillow, and, of videos, its
`qwen2_vl` and `qwen3_vl`, with frames that are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from atom.config import ConfigError
from atom.messages import MRopeGrid
from atom.multimodal.items import ImageItem, Video
from atom.multimodal.policy import MediaError
from atom.multimodal.processors.base import channel_scale, whole_number

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDER = "<|image_pad|>"
_WHERE = "preprocessor_config.json"
_BICUBIC = 3
_MOST_RATIO = 200
# Types of models whose videos' tokens have places of time; others tell time in words.
_TIMED = ("qwen2_5_vl",)
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
        least, most = _limits(own, config, _LEAST_PIXELS, _MOST_PIXELS)
        mean, std = channel_scale(own, _WHERE)
        return cls(
            int(config.image_token_id),
            int(config.vision_config.patch_size),
            int(config.vision_config.spatial_merge_size),
            least,
            most,
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
        what = pixels, (1, rows, columns), self.mean, self.std
        return ImageItem.of(*what, tokens, [(0, count)], places)


@dataclass(frozen=True)
class QwenVideoProcessor:
    """Attributes:
    patch: pixels along a side of a patch.
    merge: patches along a side of a token.
    depth: frames of a patch.
    least, most: pixels of a frame; with timestamps those of all frames together.
    tokens_per_second: places of time in a second; None where each patch of time is told in words.
    start, end: tokens around a video, or around each patch of time.
    """

    placeholder_id: int
    tokenizer: Any
    patch: int
    merge: int
    depth: int
    least: int
    most: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokens_per_second: int | None
    start: int
    end: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], config: Any, tokenizer: Any) -> QwenVideoProcessor:
        """Args:
        config: the model's.

        Raises:
            ConfigError: for settings that are none, or do not go with the model.
        """
        vision = config.vision_config
        timed = config.model_type in _TIMED
        size = 28 if timed else 32
        own = {**(_DEFAULTS if timed else {}), **settings}
        least, most = _limits(own, config, 128 * size**2, 768 * size**2)
        mean, std = channel_scale(own, _WHERE)
        return cls(
            int(config.video_token_id),
            tokenizer,
            int(vision.patch_size),
            int(vision.spatial_merge_size),
            int(vision.temporal_patch_size),
            least,
            most,
            mean,
            std,
            int(vision.tokens_per_second) if timed else None,
            int(config.vision_start_token_id),
            int(config.vision_end_token_id),
        )

    def process(self, video: Video) -> ImageItem:
        """Patches [N, depth, 3, patch, patch] of a grid of (times, rows, columns).

        Raises:
            MediaError: for frames of a shape or number that the model does not take.
        """
        width, height = self._fitting(len(video.frames), *video.frames[0].size)
        times = -(-len(video.frames) // self.depth)
        rows, columns = height // self.patch, width // self.patch
        # One time after the other: beside the frames there is only what is kept of them.
        pixels = np.empty((times, rows * columns, self.depth, 3, self.patch, self.patch), np.uint8)
        for time in range(times):
            own = video.frames[time * self.depth : (time + 1) * self.depth]
            frames = [np.asarray(frame) for frame in own]
            frames += frames[-1:] * (self.depth - len(frames))
            pixels[time] = cut(_resized(np.stack(frames), width, height), self.patch, self.merge)
        pixels = pixels.reshape(-1, *pixels.shape[2:])
        what = pixels, (times, rows, columns), self.mean, self.std
        rows, columns = rows // self.merge, columns // self.merge
        count = rows * columns
        if self.tokens_per_second is not None:
            # In the precision of the published code.
            step = np.float32(self.tokens_per_second) * np.float32(self.depth / video.fps)
            of_times = (np.arange(times, dtype=np.float32) * step).astype(np.int64).tolist()
            tokens, where = [self.placeholder_id] * (times * count), [(0, times * count)]
            places = MRopeGrid(tuple(of_times), rows, columns)
            if places.extent > times * count:
                raise MediaError(
                    f"a video of {len(video.frames)} frames, {video.fps:g} a second: its times "
                    f"reach further than its {times * count} tokens; take more frames a second"
                )
            return ImageItem.of(*what, tokens, where, places, is_video=True)
        tokens, where = [], []
        for time in range(times):
            first = time * self.depth
            last = min(first + self.depth, len(video.frames)) - 1
            seconds = (first / video.fps + last / video.fps) / 2
            tokens += self.tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            tokens.append(self.start)
            where.append((len(tokens), count))
            tokens += [self.placeholder_id] * count
            tokens.append(self.end)
        places, around = MRopeGrid((0,), rows, columns), (self.start, self.end)
        return ImageItem.of(*what, tokens, where, places, is_video=True, around=around)

    def _fitting(self, count: int, width: int, height: int) -> tuple[int, int]:
        step = self.patch * self.merge
        if self.tokens_per_second is not None:
            return fitting(width, height, step, self.least, self.most)
        if count < self.depth:
            raise MediaError(f"a video of {count} frames: this model takes at least {self.depth}")
        return fitting_frames(count, width, height, self.depth, step, self.least, self.most)


def _limits(settings: Mapping[str, Any], config: Any, least: int, most: int) -> tuple[int, int]:
    """Least and most pixels.

    Args:
        least, most: where the settings do not say it.

    Raises:
        ConfigError: for settings that are none, or do not go with the model.
    """
    if not settings.get("do_resize", True):
        raise ConfigError(f"{_WHERE}: do_resize=false is not supported")
    vision = config.vision_config
    for name, needed in (
        ("patch_size", vision.patch_size),
        ("merge_size", vision.spatial_merge_size),
        ("temporal_patch_size", vision.temporal_patch_size),
    ):
        if settings.get(name, needed) != needed:
            raise ConfigError(f"{_WHERE}: {name}={settings[name]!r}, and the model has {needed}")
    size = settings.get("size")
    if not isinstance(size, dict):
        size = {}
    limits = {
        "min_pixels": settings.get("min_pixels") or size.get("shortest_edge") or least,
        "max_pixels": settings.get("max_pixels") or size.get("longest_edge") or most,
    }
    return (
        whole_number(limits, "min_pixels", least, _WHERE),
        whole_number(limits, "max_pixels", most, _WHERE),
    )


def _resized(frames: npt.NDArray[np.uint8], width: int, height: int) -> npt.NDArray[np.uint8]:
    """Frames [n, height, width, 3] of another size: by torch, as the published processors do."""
    if frames.shape[1:3] == (height, width):
        return frames
    planes = torch.from_numpy(frames).permute(0, 3, 1, 2)
    resized = F.interpolate(planes, (height, width), mode="bicubic", antialias=True)
    out: npt.NDArray[np.uint8] = resized.permute(0, 2, 3, 1).numpy()
    return out


def fitting(width: int, height: int, step: int, least: int, most: int) -> tuple[int, int]:
    """The width and height, multiples of `step`, of about the same shape, with a number of pixels
    between both limits, that an image of this size is resized to.

    Raises:
        MediaError: where one side is more than 200 times the other.
    """
    _check_shape(width, height)
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


def fitting_frames(
    count: int, width: int, height: int, depth: int, step: int, least: int, most: int
) -> tuple[int, int]:
    """As `fitting`, of `count` frames with the limits of all of them; `depth` are a patch deep.

    Raises:
        MediaError: as `fitting`.
    """
    if min(width, height) < step:
        grow = max(step / height, step / width)
        width, height = int(width * grow), int(height * grow)
    _check_shape(width, height)
    wide, high = (round(side / step) * step for side in (width, height))
    whole = round(count / depth) * depth
    if whole * high * wide > most:
        shrink = math.sqrt(count * height * width / most)
        wide, high = (
            max(step, math.floor(side / shrink / step) * step) for side in (width, height)
        )
    elif whole * high * wide < least:
        grow = math.sqrt(least / (count * height * width))
        wide, high = (math.ceil(side * grow / step) * step for side in (width, height))
    return wide, high


def _check_shape(width: int, height: int) -> None:
    if max(width, height) / min(width, height) > _MOST_RATIO:
        raise MediaError(
            f"an image of {width} by {height} pixels: this model takes none with a side more than "
            f"{_MOST_RATIO} times the other"
        )


def cut(frames: npt.NDArray[np.uint8], patch: int, merge: int) -> npt.NDArray[np.uint8]:
    """Frames [n, height, width, 3] that are one patch deep -> [N, n, 3, patch, patch], row by row,
    those of a token together.
    """
    count, height, width, channels = frames.shape
    step = patch * merge
    own = frames.reshape(count, height // step, merge, patch, width // step, merge, patch, channels)
    patches: npt.NDArray[np.uint8] = own.transpose(1, 4, 2, 5, 0, 7, 3, 6)
    return patches.reshape(-1, count, channels, patch, patch)
