"""From an image file's bytes to its pixels, checked before they are decoded."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atom.multimodal.policy import MediaError
from atom.quoting import excerpt

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

# The formats by what their files begin with; no other of Pillow's decoders ever runs.
_BEGINNINGS = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "GIF": re.compile(rb"GIF8[79]a"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "BMP": re.compile(rb"BM"),
}
FORMATS = ", ".join(_BEGINNINGS)
# Some clients say image/jpg.
_MIME_TYPES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WEBP",
    "image/bmp": "BMP",
    "image/x-ms-bmp": "BMP",
}

# Chunks, segments and blocks of a file, and bytes between them. Each takes the time and memory of
# hundreds of bytes.
_MOST_PIECES = 100_000
# Progressive files have about ten. Each costs a pass over all pixels, however few bytes it has.
_MOST_SCANS = 100
_SCAN = b"\xff\xda"
# A JPEG holds 64 KiB of it, once: tags that overlap make of n bytes up to n * n / 48.
_MOST_EXIF = 2**16
_MARK = 0xFF
# Marks without a length: an escaped byte, and what begins, ends and restarts.
_BARE = {0x00, 0x01, *range(0xD0, 0xDA)}
_RUN_LENGTHS = (b"\x01\0\0\0", b"\x02\0\0\0")
_EXIF = re.compile(rb"\xff\xe1..Exif\0\0", re.DOTALL)
_ORIENTATION = 0x0112


def format_of_mime(mime: str) -> str:
    """The format that a type of media names.

    Raises:
        MediaError: for any other type than those of images that are taken.
    """
    try:
        return _MIME_TYPES[mime.lower()]
    except KeyError:
        raise MediaError(
            f"{excerpt(mime)!r} is not a type of images that are taken: "
            f"{', '.join(sorted(_MIME_TYPES))}"
        ) from None


def decode(data: bytes, max_pixels: int, expected: str | None = None) -> Image:
    """The pixels of an image file, RGB, turned as its Exif data says; of several the first frame.

    Args:
        expected: the format that it is said to have.

    Raises:
        MediaError: for what is no image, is damaged or cut, or has too many pixels.
    """
    found = next((name for name, begins in _BEGINNINGS.items() if begins.match(data)), None)
    if found is None:
        is_svg = b"<svg" in data[:4096].lower()
        what = "is SVG" if is_svg else "is not an image" if data else "is empty"
        raise MediaError(f"the file {what}; expected one of {FORMATS}")
    if expected is not None and expected != found:
        raise MediaError(f"the file is {found}, but was sent as {expected}")
    if found == "JPEG" and data.count(_SCAN) > _MOST_SCANS:
        raise MediaError(f"the JPEG file has more than {_MOST_SCANS} scans")
    if found == "JPEG" and len(_EXIF.findall(data)) > 1:
        raise MediaError("the JPEG file has Exif data more than once")
    _check_pieces(found, data)
    from PIL import Image as pillow

    try:
        with _open(found, data) as image:
            return as_rgb(image, max_pixels)
    except MediaError:
        raise
    except pillow.DecompressionBombError:
        raise MediaError(f"the {found} file has more than {max_pixels} pixels") from None
    except Exception as error:  # decoders of hostile data: anything can come out of them
        logger.debug("an image cannot be decoded", exc_info=error)
        raise MediaError(
            f"the {found} file is damaged or cut: {excerpt(str(error)) or type(error).__name__}"
        ) from None


def _open(format: str, data: bytes) -> Image:
    """The image of a file; a JPEG's first one where there are several (MPO).

    A table in the file says where the others are. Its tags may overlap, and all are read by
    `pillow.open`.
    """
    from PIL import Image as pillow

    file = io.BytesIO(data)
    if format != "JPEG":
        return pillow.open(file, formats=[format])
    from PIL.JpegImagePlugin import JpegImageFile

    return JpegImageFile(file)


def _check_pieces(format: str, data: bytes) -> None:
    """Refuse files whose parts would take Pillow, which goes through them in Python, long to read.

    Raises:
        MediaError: for too many of them, or run lengths.
    """
    if format == "BMP" and data[30:34] in _RUN_LENGTHS:
        raise MediaError("the BMP file is run-length encoded; send it as PNG")
    walk = _WALKS.get(format)
    if walk is not None and any(number > _MOST_PIECES for number in walk(data)):
        raise MediaError(f"the {format} file has more than {_MOST_PIECES} parts")


def _chunks(data: bytes) -> Iterator[int]:
    """The numbers of parts of a PNG, up to any place."""
    place, number = 8, 0
    while place < len(data):
        place += 12 + int.from_bytes(data[place : place + 4], "big")
        number += 1
        yield number


def _segments(data: bytes) -> Iterator[int]:
    """The same of a JPEG, up to its pixels."""
    place, number = 2, 0
    while place + 1 < len(data):
        number += 1
        yield number
        kind = data[place + 1]
        if data[place] != _MARK or kind == _MARK:
            place += 1
        elif kind == _SCAN[1]:
            return
        elif kind in _BARE:
            place += 2
        else:
            place += 2 + max(2, int.from_bytes(data[place + 2 : place + 4], "big"))


def _blocks(data: bytes) -> Iterator[int]:
    """The same of a GIF, up to its first frame."""
    place, number = 13, 0
    if data[10:11] and data[10] & 0x80:
        place += 3 << (data[10] & 7) + 1
    while place < len(data) and data[place : place + 1] not in (b",", b";"):
        number += 1
        yield number
        if data[place : place + 1] != b"!":
            place += 1
            continue
        place += 2
        while place < len(data) and data[place]:
            place += 1 + data[place]
            number += 1
            yield number
        place += 1


_WALKS = {"PNG": _chunks, "JPEG": _segments, "GIF": _blocks}


def as_rgb(image: Image, max_pixels: int) -> Image:
    """An opened image's pixels as RGB, upright; the image itself stays as it is.

    Source: transformers' `load_image`, whose result is the same.

    Raises:
        MediaError: beyond `max_pixels`, before anything is decoded.
    """
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(
            f"the image has {width} x {height} pixels, and at most {max_pixels} are taken"
        )
    image.load()
    # As text, where some programs put it in a PNG, a byte is two digits.
    spelled = len(image.info.get("Raw profile type exif", "")) // 2
    size = max(len(image.info.get("exif", b"")), spelled)
    if size > _MOST_EXIF + 64:
        raise MediaError(f"the image has {size} bytes of Exif data; at most {_MOST_EXIF} are read")
    turn = turns.get(image.getexif().get(_ORIENTATION, 1))
    return (image if turn is None else image.transpose(turn)).convert("RGB")
