"""Image files for tests, good and bad."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def gradient(width: int = 7, height: int = 5, mode: str = "RGB") -> Image.Image:
    """No two pixels of a row or column are alike."""
    y, x = np.indices((height, width))
    pixels = np.stack([37 * x % 256, 91 * y % 256, (x + y) % 256], axis=2)
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of so many pixels, all black, in a thousandth of their bytes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    num_rows = min(height, 2000)
    row = bytes(3 * width + 1)
    compressor = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    one = compressor.compress(row) + compressor.flush(zlib.Z_FULL_FLUSH)  # may be repeated
    checksum = struct.pack(">HH", num_rows * len(row) % 65521, 1)  # Adler-32 of zeros
    body = chunk(b"IDAT", b"\x78\xda" + one * num_rows + compressor.flush() + checksum)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def deflated(num_megabytes: int) -> bytes:
    """So many zeros."""
    compressor = zlib.compressobj(9)
    return (
        b"".join(compressor.compress(bytes(2**20)) for _ in range(num_megabytes))
        + compressor.flush()
    )


def gif_bomb(screen: tuple[int, int], frame: tuple[int, int]) -> bytes:
    """A GIF whose first frame may be larger than its screen."""
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return head + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\0;"


def exif_bomb(num_tags: int, num_bytes: int) -> bytes:
    """Exif data in which every tag's value is nearly all of the data."""
    size = 8 + 2 + 12 * num_tags + 4
    tags = (struct.pack("<HHII", 0x9000 + i, 7, num_bytes - size, size) for i in range(num_tags))
    ifd = struct.pack("<H", num_tags) + b"".join(tags) + bytes(4)
    return b"Exif\0\0" + (b"II*\0\x08\0\0\0" + ifd).ljust(num_bytes, b"x")
