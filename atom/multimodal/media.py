"""Images and videos from what requests and programs give: URLs, bytes, files, arrays, pictures."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from atom.multimodal.fetch import Fetcher
from atom.multimodal.items import Video
from atom.multimodal.pixels import as_rgb, decode, format_of_mime
from atom.multimodal.policy import MediaError, MediaPolicy
from atom.quoting import quote

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_DATA_HEAD = re.compile(r"data:([a-z0-9.+/-]*);base64", re.IGNORECASE)
# Of a head that is longer nothing is looked at.
_MOST_HEAD = 256


@dataclass(frozen=True)
class MediaFile:
    """An image's bytes as they were read; `expected` is the format that they were said to have."""

    data: bytes
    expected: str | None = None


# Frames of a second, where nobody says how many: as many as models are trained with.
DEFAULT_FPS = 2.0
_MOST_FRAMES = 768
# What all frames of a video may have together, in multiples of an image's pixels.
_VIDEO_PIXELS = 4
_VIDEO_HEAD = "data:video/jpeg;base64,"


@dataclass(frozen=True)
class VideoSource:
    """A video as it is given, to be loaded.

    Attributes:
        frames: a sequence of what `MediaLoader.load` takes, an array of uint8 [frames, height,
            width, 3], or a URL `data:video/jpeg;base64,FRAME,FRAME,...`.
        fps: frames of a second.
    """

    frames: Any
    fps: float = DEFAULT_FPS


class MediaLoader:
    """Reads and decodes images under a policy, in the calling thread, of which there may be many.

    Args:
        fetcher: reads http(s) URLs; one under the same policy when omitted.

    Raises:
        MediaError: where Pillow is not installed.
    """

    def __init__(self, policy: MediaPolicy, fetcher: Fetcher | None = None) -> None:
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise MediaError("images need Pillow: pip install 'atom-llm[images]'") from None
        self._policy = policy
        self._fetcher = fetcher or Fetcher(policy)
        # A Pillow image reads its file when its pixels are first asked for, which two threads that
        # are given the same one may not do at once.
        self._reading = Lock()

    def load(self, reference: str | bytes | Path | Image | np.ndarray[Any, Any]) -> Image:
        """The image, RGB and upright, as transformers' `load_image` gives it.

        Args:
            reference: a data:, http(s): or file: URL; a file's bytes; or, from a program itself,
                a path (not bound to the allowed folder), a Pillow image, or an array of uint8,
                [height, width], [height, width, 3] or [height, width, 4].

        Raises:
            MediaError: for what is not allowed, too large, damaged or no image.
        """
        if isinstance(reference, str):
            return self.decode(self.read(reference))
        if isinstance(reference, bytes):
            self._check_size(len(reference))
            return self.decode(MediaFile(reference))
        if isinstance(reference, Path):
            return self.decode(MediaFile(self._read_file(reference)))
        from PIL import Image as pillow

        if isinstance(reference, pillow.Image):
            with self._reading:
                return as_rgb(reference, self._policy.max_pixels)
        return as_rgb(_from_array(reference), self._policy.max_pixels)

    def load_video(self, source: VideoSource) -> Video:
        """The frames of a video, each as `load` gives it.

        Raises:
            MediaError: for what is not allowed, too large, damaged or no video.
        """
        if isinstance(source.fps, bool) or not isinstance(source.fps, (int, float)):
            raise MediaError(f"fps should be a number, got {quote(source.fps)}")
        if not 0.01 <= source.fps <= 1000:
            raise MediaError(f"fps should be in [0.01, 1000], got {source.fps}")
        frames: list[Image] = []
        for reference in _frames_of(source.frames):
            try:
                frame = self.load(reference)
            except MediaError as error:
                raise MediaError(f"frame {len(frames) + 1}: {error}") from None
            if frame.size != (frames[0] if frames else frame).size:
                raise MediaError(
                    f"frame {len(frames) + 1} of a video has {frame.width} by {frame.height} "
                    f"pixels, and the first {frames[0].width} by {frames[0].height}"
                )
            frames.append(frame)
            pixels = len(frames) * frame.width * frame.height
            if len(frames) > _MOST_FRAMES or pixels > _VIDEO_PIXELS * self._policy.max_pixels:
                raise MediaError(
                    f"a video of {len(frames)} or more frames of {frame.width} by {frame.height} "
                    f"pixels; at most {_MOST_FRAMES} frames are read, and "
                    f"{_VIDEO_PIXELS * self._policy.max_pixels} pixels in all; take fewer or "
                    f"smaller ones"
                )
        if not frames:
            raise MediaError("a video without frames")
        return Video(tuple(frames), float(source.fps))

    def read(self, url: str) -> MediaFile:
        """The file that a data:, http(s): or file: URL stands for, not decoded yet.

        Raises:
            MediaError: for what is not allowed, cannot be read or is too large.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            head, comma, payload = url.partition(",")
            match = _DATA_HEAD.fullmatch(head[:_MOST_HEAD])
            if match is None or not comma:
                raise MediaError(
                    f"expected data:image/TYPE;base64,DATA, got {quote(url[:_MOST_HEAD])}"
                )
            # Without a type, as RFC 2397 allows, the bytes alone say what they are.
            expected = format_of_mime(match[1]) if match[1] else None
            return MediaFile(self._from_base64(payload), expected)
        if scheme in ("http", "https"):
            return MediaFile(self._fetcher.read(url))
        if scheme == "file":
            return MediaFile(self._read_file(self._allowed_path(url)))
        raise MediaError(f"expected a data:, https:, http: or file: URL, got {quote(url)}")

    def decode(self, file: MediaFile) -> Image:
        """The image of a file.

        Raises:
            MediaError: for what is damaged, too large or no image.
        """
        return decode(file.data, self._policy.max_pixels, file.expected)

    def _from_base64(self, text: str) -> bytes:
        """Raises MediaError for too much, and what is not base64 to the last character."""
        self._check_size(len(text) * 3 // 4 - 2)
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise MediaError(f"the image's data are not base64: {quote(str(error))}") from None
        self._check_size(len(data))
        return data

    def _allowed_path(self, url: str) -> Path:
        """The real path of a file: URL.

        Raises:
            MediaError: for one that is not below the allowed folder.
        """
        folder = self._policy.allowed_local_path
        if folder is None:
            raise MediaError(
                "this server reads no files: send a data: URL, or start it with "
                "--allowed-local-media-path"
            )
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict"))
            if parts.netloc not in ("", "localhost") or not path.is_absolute():
                raise ValueError("expected file:///PATH")
            real = path.resolve()
        except (ValueError, OSError, RuntimeError) as error:
            raise MediaError(f"{quote(url)} is not the URL of a file: {error}") from None
        if not real.is_relative_to(folder):
            raise MediaError(f"{quote(url)} is not below --allowed-local-media-path of this server")
        return real

    def _read_file(self, path: Path) -> bytes:
        try:
            if not path.is_file():  # a pipe that nobody writes to would hold this thread
                raise MediaError(f"{quote(str(path))} is not a file")
            with path.open("rb") as file:
                data = file.read(self._policy.max_bytes + 1)
        except OSError as error:
            raise MediaError(f"{quote(str(path))} cannot be read: {error.strerror}") from None
        self._check_size(len(data))
        return data

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._policy.max_bytes:
            raise MediaError(
                f"the image has more than the {self._policy.max_bytes} bytes that an image may have"
            )


def _from_array(array: Any) -> Image:
    import numpy as np
    from PIL import Image as pillow

    if not isinstance(array, np.ndarray):
        raise MediaError(
            f"expected a URL, bytes, a path, a Pillow image or an array, got {type(array).__name__}"
        )
    is_shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not is_shaped or not array.size:
        raise MediaError(
            "expected an array of uint8, [height, width], [height, width, 3] or [height, width, "
            f"4], got {array.dtype} {list(array.shape)}"
        )
    return pillow.fromarray(array)


def check_video_url(url: str) -> None:
    """Raises MediaError for a URL that holds no frames: no decoder of videos is here."""
    if url[: len(_VIDEO_HEAD)].lower() != _VIDEO_HEAD:
        raise MediaError(
            f"videos are read as frames, {_VIDEO_HEAD}FRAME,FRAME,... with a JPEG image each; "
            f"decode others before they are sent; got {quote(url[:_MOST_HEAD])}"
        )


def _frames_of(given: Any) -> Iterable[Any]:
    if isinstance(given, str):
        check_video_url(given)
        # Counted before it is split: commas alone would be millions of frames.
        if (count := given.count(",")) > _MOST_FRAMES:
            raise MediaError(f"a video of {count} frames; at most {_MOST_FRAMES} are read")
        parts = given[len(_VIDEO_HEAD) :].split(",")
        return (f"data:image/jpeg;base64,{part}" for part in parts)
    if getattr(given, "ndim", None) == 4 or (
        isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    ):
        frames: Iterable[Any] = iter(given)
        return frames
    raise MediaError(
        f"expected a video as a list of frames, an array [frames, height, width, 3] or a URL "
        f"{_VIDEO_HEAD}FRAME,FRAME,..., got {type(given).__name__}"
    )
