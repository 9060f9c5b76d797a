"""Images of models that run by transformers' modelling code, made by its own processors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atom.config import ConfigError
from atom.models.transformers.images import TransformersImages
from atom.multimodal.items import ImageItem
from atom.multimodal.processors.base import channel_scale, runs

if TYPE_CHECKING:
    from PIL.Image import Image

# Sizes of images that are tried when a processor is loaded.
_TRIED = ((30, 40), (67, 31))


@dataclass(frozen=True)
class TransformersImageProcessor:
    images: TransformersImages
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, folder: Path) -> TransformersImageProcessor:
        """Raises:
        ConfigError: for settings that are not supported.
        """
        images = TransformersImages(folder)
        made = cls(images, *channel_scale(images.settings, str(folder)))
        for seed, size in enumerate(_TRIED):
            made._try(size, seed)
        return made

    def _try(self, size: tuple[int, int], seed: int) -> None:
        """Raises:
        ConfigError: where pixels are not normalised channel by channel, last of all.
        """
        from PIL import Image as pillow

        noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
        image = pillow.fromarray(noise)
        found = self.images.process(image).pixels.astype(np.float32)
        mean, std = (np.array(x, np.float32).reshape(-1, 1, 1) for x in (self.mean, self.std))
        expected = self.images.normalised(image)
        if found.shape != expected.shape or np.abs((found - mean) / std - expected).max() > 1e-5:
            raise ConfigError(
                "the checkpoint's image processor does something behind normalising pixels, which "
                "is not supported; --language-model-only runs the text network"
            )

    @property
    def placeholder(self) -> str:
        return self.images.placeholder

    @property
    def placeholder_id(self) -> int:
        return self.images.placeholder_id

    def process(self, image: Image) -> ImageItem:
        """The grid is the size that the processor states, if it does."""
        made = self.images.process(image)
        ranges = runs(made.token_ids, self.placeholder_id)
        return ImageItem.of(made.pixels, made.size, self.mean, self.std, made.token_ids, ranges)
