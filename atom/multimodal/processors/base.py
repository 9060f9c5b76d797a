"""The interface of image processors, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atom.config import ConfigError
from atom.models.config.file import is_there, read_json_object
from atom.multimodal.items import ImageItem, Video

if TYPE_CHECKING:
    from PIL.Image import Image


class VideoProcessor(Protocol):
    """Makes encoder inputs of videos.

    Attributes:
        placeholder_id: the token that stands for one in a prompt.
    """

    @property
    def placeholder_id(self) -> int: ...

    def process(self, video: Video) -> ImageItem:
        """Raises:
        MediaError: for more or fewer frames than the model takes.
        """
        ...


_HALF = (0.5, 0.5, 0.5)


class ImageProcessor(Protocol):
    """Makes encoder inputs of images.

    Attributes:
        placeholder: the text that stands for an image in a prompt, as the model's template has it.
        placeholder_id: its token.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def placeholder_id(self) -> int: ...

    def process(self, image: Image) -> ImageItem:
        """Args:
        image: RGB, at least one pixel high and wide.
        """
        ...


def video_settings(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its video processor: in a file of its own, or else in that of
    images.

    Raises:
        ConfigError: when a file is damaged.
    """
    path = folder / "video_preprocessor_config.json"
    if is_there(path):
        return read_json_object(path)
    path = folder / "processor_config.json"
    inner = read_json_object(path).get("video_processor") if is_there(path) else None
    return inner if isinstance(inner, dict) else processor_settings(folder)


def processor_settings(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its image processor; empty if it says nothing.

    Raises:
        ConfigError: when a file is damaged.
    """
    path = folder / "preprocessor_config.json"
    if is_there(path):
        return read_json_object(path)
    path = folder / "processor_config.json"
    if is_there(path):
        inner = read_json_object(path).get("image_processor", {})
        if isinstance(inner, dict):
            return inner
    return {}


def channel_scale(
    settings: Mapping[str, Any], where: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, in units of 8-bit pixels.

    Raises:
        ConfigError: when they are no three numbers, or pixels are not divided by 255.
    """
    scale = settings.get("rescale_factor", 1 / 255)
    if not settings.get("do_rescale", True) or abs(scale * 255 - 1) > 1e-6:
        raise ConfigError(f"{where}: pixels that are not divided by 255 are not supported")
    if not settings.get("do_normalize", True):
        return (0.0, 0.0, 0.0), (255.0, 255.0, 255.0)
    found = []
    for name in ("image_mean", "image_std"):
        values = settings.get(name) or _HALF
        if len(values) != 3 or not all(isinstance(value, (int, float)) for value in values):
            raise ConfigError(f"{where}: {name}={values!r}, expected three numbers")
        found.append(tuple(float(value) * 255 for value in values))
    return found[0], found[1]


def whole_number(settings: Mapping[str, Any], name: str, default: int, where: str) -> int:
    """Raises:
    ConfigError: when the setting is no integer of at least 1.
    """
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {name}={value!r}, expected an integer of at least 1")
    return value


def runs(tokens: list[int], wanted: int) -> list[tuple[int, int]]:
    """Where a token is: first place and number of each run."""
    found: list[tuple[int, int]] = []
    for place, token in enumerate(tokens):
        if token != wanted:
            continue
        if found and sum(found[-1]) == place:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((place, 1))
    return found
