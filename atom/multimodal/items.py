"""Processed images and videos, and their places in a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from atom.messages import ImageInput, MRopeGrid, RequestRefusedError

if TYPE_CHECKING:
    from PIL.Image import Image


# Images of one request that are read or processed at a time, where a program gives them.
AT_ONCE = 4
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Video:
    """Frames in their order, RGB and of one size, so many of them in a second."""

    frames: tuple[Image, ...]
    fps: float


@dataclass(frozen=True)
class ImageItem:
    """An image or a video as its encoder takes it, wherever it is in a prompt.

    Attributes:
        is_video: whether its placeholder is that of videos.
        around: tokens beside that which it takes the place of, too, where both are there.
        pixels, grid, mean, std, digest, mrope_grid: as in `ImageInput`.
        token_ids: what takes the place of the placeholder.
        ranges: which of these the encoder's rows stand for: first and number, in order.
    """

    pixels: npt.NDArray[np.uint8]
    grid: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    token_ids: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    digest: bytes
    mrope_grid: MRopeGrid | None = None
    is_video: bool = False
    around: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        pixels: npt.NDArray[np.uint8],
        grid: tuple[int, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        token_ids: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        mrope_grid: MRopeGrid | None = None,
        is_video: bool = False,
        around: tuple[int, int] | None = None,
    ) -> ImageItem:
        """With the digest of all that the encoder and the rotation of its tokens read."""
        kept = np.ascontiguousarray(pixels)
        stated = repr((kept.shape, grid, mean, std, mrope_grid)).encode()
        digest = hashlib.sha256(stated)
        digest.update(kept.data)
        where = tuple(token_ids), tuple(ranges), digest.digest()
        return cls(kept, grid, mean, std, *where, mrope_grid, is_video, around)

    @property
    def num_tokens(self) -> int:
        """Rows that the encoder makes."""
        return sum(count for _, count in self.ranges)

    def at(self, position: int) -> ImageInput:
        """The image in a prompt, where its first token has this position."""
        return ImageInput(
            digest=self.digest,
            ranges=tuple((position + start, count) for start, count in self.ranges),
            pixels=self.pixels.tobytes(),
            shape=self.pixels.shape,
            grid=self.grid,
            mean=self.mean,
            std=self.std,
            mrope_grid=self.mrope_grid,
        )


def expand(
    token_ids: Sequence[int],
    items: Sequence[ImageItem],
    placeholder_id: int,
    video_placeholder_id: int | None = None,
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Put the items' tokens in the places of their placeholders.

    Args:
        items: images in their order, and videos in theirs.
        video_placeholder_id: None where no videos are read.

    Raises:
        RequestRefusedError: when there are more or fewer placeholders than items of a kind.
    """
    kinds = {placeholder_id: "images"}
    if video_placeholder_id is not None:
        kinds[video_placeholder_id] = "videos"
    waiting = {}
    for own, kind in kinds.items():
        waiting[own] = [item for item in items if item.is_video == (kind == "videos")]
        count, given = token_ids.count(own), len(waiting[own])
        if count != given:
            raise RequestRefusedError(
                f"the prompt has {count} placeholders of {kind}, and {given} {kind} came with it; "
                f"write one for each",
                "multi_modal_data",
            )
    expanded: list[int] = []
    inputs: list[ImageInput] = []
    rest = iter(range(len(token_ids)))
    for place in rest:
        if token_ids[place] not in kinds:
            expanded.append(token_ids[place])
            continue
        item = waiting[token_ids[place]].pop(0)
        if item.around is not None and (
            (*expanded[-1:], *token_ids[place + 1 : place + 2]) == item.around
        ):
            expanded.pop()
            next(rest)
        inputs.append(item.at(len(expanded)))
        expanded += item.token_ids
    return expanded, tuple(inputs)


def side_by_side(work: Callable[[Given], Made], given: Sequence[Given]) -> list[Made]:
    """What `work` makes of each, in their order, of up to `AT_ONCE` at a time.

    Raises:
        Exception: what it raises for the first of them for which it does.
    """
    if len(given) < 2:
        return [work(each) for each in given]
    with ThreadPoolExecutor(min(AT_ONCE, len(given)), thread_name_prefix="image") as pool:
        return list(pool.map(work, given))


def check_count(given: Sequence[Any], most_images: int, most_videos: int) -> None:
    """Raises RequestRefusedError when a prompt has more images or videos than it may."""
    videos = sum(isinstance(item, Video) for item in given)
    counts = (("images", len(given) - videos, most_images), ("videos", videos, most_videos))
    for kind, count, most in counts:
        if count > most:
            raise RequestRefusedError(
                f"{count} {kind} in one prompt; at most {most} are read (--limit-mm-per-prompt)",
                "multi_modal_data",
            )
