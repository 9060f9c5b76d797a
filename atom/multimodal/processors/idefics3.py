"""Images of Idefics3 and SmolVLM: tiles of a size, then the whole image as one of them.

Source of the arithmetic: transformers' `idefics3`, its processor for Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from atom.config import ConfigError
from atom.multimodal.items import ImageItem
from atom.multimodal.processors.base import channel_scale, runs, whole_number

if TYPE_CHECKING:
    from PIL.Image import Image

PLACEHOLDER = "<image>"
_WHERE = "preprocessor_config.json"
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"
# No image becomes larger, whatever the settings say.
_MOST_PIXELS_ALONG = 4096
_LANCZOS = 1


@dataclass(frozen=True)
class Idefics3ImageProcessor:
    """Attributes:
    tile: pixels along a side of a tile.
    tile_tokens: rows that the encoder makes of one.
    longest: pixels along the longer side that images are resized to, before they are cut.
    splits: whether they are cut; else each is one tile.
    """

    placeholder_id: int
    tokenizer: Any
    tile: int
    tile_tokens: int
    longest: int
    splits: bool
    resample: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    placeholder: str = PLACEHOLDER
    _tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, settings: Mapping[str, Any], config: Any, tokenizer: Any) -> Idefics3ImageProcessor:
        """Args:
        config: the model's.

        Raises:
            ConfigError: for settings that are none, or do not go with the model.
        """
        vision = config.vision_config
        tile = _edge(settings, "max_image_size", vision.image_size)
        if tile != vision.image_size:
            raise ConfigError(
                f"{_WHERE}: max_image_size={tile}, and the model's tiles have "
                f"image_size={vision.image_size}"
            )
        if not settings.get("do_resize", True):
            raise ConfigError(f"{_WHERE}: do_resize=false is not supported")
        along = tile // vision.patch_size // config.scale_factor
        mean, std = channel_scale(settings, _WHERE)
        return cls(
            int(config.image_token_id),
            tokenizer,
            tile,
            along * along,
            _edge(settings, "size", 4 * tile),
            bool(settings.get("do_image_splitting", True)),
            whole_number(settings, "resample", _LANCZOS, _WHERE),
            mean,
            std,
        )

    def process(self, image: Image) -> ImageItem:
        """Tiles [n, 3, tile, tile], row by row and the whole last; the grid is (rows, columns),
        or (0, 0) where there is the whole alone.
        """
        image = self._resized(image, *self._fitting(image.width, image.height))
        rows = columns = 0
        tiles = []
        if self.splits:
            image = self._resized(image, *self._multiple(image.width, image.height))
            if max(image.size) > self.tile:
                rows, columns = image.height // self.tile, image.width // self.tile
                pixels = np.asarray(image).reshape(rows, self.tile, columns, self.tile, 3)
                tiles.append(pixels.transpose(0, 2, 4, 1, 3).reshape(-1, 3, self.tile, self.tile))
        if not self.splits or rows:
            image = self._resized(image, self.tile, self.tile)
        tiles.append(np.asarray(image).transpose(2, 0, 1)[None])
        tokens = self._expansion(rows, columns)
        return ImageItem.of(
            np.concatenate(tiles),
            (rows, columns),
            self.mean,
            self.std,
            tokens,
            runs(tokens, self.placeholder_id),
        )

    def _resized(self, image: Image, width: int, height: int) -> Image:
        from PIL.Image import Resampling

        return image.resize((width, height), Resampling(self.resample))

    def _fitting(self, width: int, height: int) -> tuple[int, int]:
        """With the longer side as long as it must be, and the other even."""
        ratio = width / height
        if width >= height:
            width = self.longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest
            width = int(height * ratio)
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        if width >= height and width > _MOST_PIXELS_ALONG:
            width, height = _MOST_PIXELS_ALONG, int(_MOST_PIXELS_ALONG / (width / height))
        elif height > width and height > _MOST_PIXELS_ALONG:
            width, height = int(_MOST_PIXELS_ALONG * (width / height)), _MOST_PIXELS_ALONG
        return max(width, 1), max(height, 1)

    def _multiple(self, width: int, height: int) -> tuple[int, int]:
        """Of whole tiles."""
        tile, ratio = self.tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return width, height

    def _expansion(self, rows: int, columns: int) -> list[int]:
        """The tokens of an image: each tile behind its place, lines of tiles, and the whole."""
        known = self._tokens.get((rows, columns))
        if known is not None:
            return known
        of_tile = PLACEHOLDER * self.tile_tokens
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{_FAKE}<row_{row}_col_{column}>{of_tile}"
            text += "\n"
        if rows:
            text += "\n"
        text += f"{_FAKE}{_GLOBAL}{of_tile}{_FAKE}"
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        expected = (rows * columns + 1) * self.tile_tokens
        if tokens.count(self.placeholder_id) != expected:
            raise ConfigError(
                f"the tokenizer has no token {PLACEHOLDER} of id {self.placeholder_id}, which "
                f"stands for images"
            )
        self._tokens[rows, columns] = tokens
        return tokens


def _edge(settings: Mapping[str, Any], name: str, default: int) -> int:
    """Raises:
    ConfigError: when the setting is no object with `longest_edge`.
    """
    size = settings.get(name) or {"longest_edge": default}
    if not isinstance(size, dict):
        raise ConfigError(f"{_WHERE}: {name}={size!r}, expected an object with longest_edge")
    return whole_number({name: size.get("longest_edge")}, name, default, _WHERE)
