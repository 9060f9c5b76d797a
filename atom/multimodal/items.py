"""Processed images, and their places in a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from atom.messages import ImageInput, MRopeGrid, RequestRefusedError


@dataclass(frozen=True)
class ImageItem:
    """An image as its encoder takes it, wherever it is in a prompt.

    Attributes:
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
    ) -> ImageItem:
        """With the digest of all that the encoder and the rotation of its tokens read."""
        kept = np.ascontiguousarray(pixels)
        stated = repr((kept.shape, grid, mean, std, mrope_grid)).encode()
        digest = hashlib.sha256(stated)
        digest.update(kept.data)
        where = tuple(token_ids), tuple(ranges), digest.digest()
        return cls(kept, grid, mean, std, *where, mrope_grid)

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
    token_ids: Sequence[int], items: Sequence[ImageItem], placeholder_id: int
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Put the images' tokens in the places of their placeholders.

    Raises:
        RequestRefusedError: when there are more or fewer of these than images.
    """
    count = sum(token == placeholder_id for token in token_ids)
    if count != len(items):
        raise RequestRefusedError(
            f"the prompt has {count} placeholders of images, and {len(items)} images came with it; "
            f"write one for each image",
            "multi_modal_data",
        )
    expanded: list[int] = []
    inputs: list[ImageInput] = []
    for token in token_ids:
        if token != placeholder_id:
            expanded.append(token)
            continue
        item = items[len(inputs)]
        inputs.append(item.at(len(expanded)))
        expanded += item.token_ids
    return expanded, tuple(inputs)


def check_count(images: Sequence[Any], most: int) -> None:
    """Raises RequestRefusedError when a prompt has more images than it may."""
    if len(images) > most:
        raise RequestRefusedError(
            f"{len(images)} images in one prompt; at most {most} are read (--limit-mm-per-prompt)",
            "multi_modal_data",
        )
