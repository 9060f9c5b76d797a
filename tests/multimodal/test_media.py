from __future__ import annotations

import base64
import contextlib
import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pictures
import pytest
from PIL import Image
from transformers.image_utils import load_image

from atom.multimodal.media import MediaLoader
from atom.multimodal.policy import MediaError, MediaPolicy

FORMATS = {"PNG": "png", "JPEG": "jpeg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}


def url_of(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def loader() -> MediaLoader:
    return MediaLoader(MediaPolicy())


def same(ours: Image.Image, data: bytes) -> None:
    """Equal to transformers' to the bit."""
    theirs = load_image(Image.open(io.BytesIO(data)))
    assert ours.mode == theirs.mode == "RGB"
    assert ours.size == theirs.size
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_as_transformers_has_it(loader: MediaLoader, format: str) -> None:
    data = pictures.encoded(pictures.gradient(), format)
    same(loader.load(data), data)
    same(loader.load(url_of(data, f"image/{FORMATS[format]}")), data)


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        *(("L", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("1", "PNG"), ("P", "GIF")),
        *(("CMYK", "JPEG"), ("L", "JPEG"), ("RGBA", "WEBP"), ("I;16", "PNG")),
    ],
)
def test_every_mode_is_as_transformers_has_it(loader: MediaLoader, mode: str, format: str) -> None:
    if mode == "I;16":
        values = np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800
        image = Image.fromarray(values)
        assert image.mode == mode
    else:
        image = pictures.gradient(mode=mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.new("L", image.size, 99))
    data = pictures.encoded(image, format)
    same(loader.load(data), data)


def test_palettes_with_transparency(loader: MediaLoader) -> None:
    data = pictures.encoded(pictures.gradient(mode="P"), "PNG", transparency=3)
    same(loader.load(data), data)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns(loader: MediaLoader, format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = pictures.encoded(pictures.gradient(), format, exif=exif)
    same(loader.load(data), data)
    assert (loader.load(data).size == (5, 7)) == (orientation > 4)


def test_the_first_frame_is_the_image(loader: MediaLoader) -> None:
    frames = [pictures.gradient(), Image.new("RGB", (7, 5), "red")]
    for format in ("GIF", "WEBP", "PNG"):
        data = pictures.encoded(
            frames[0], format, save_all=True, append_images=frames[1:], lossless=True
        )
        assert Image.open(io.BytesIO(data)).n_frames == 2
        same(loader.load(data), data)


def test_programs_give_paths_pictures_and_arrays(loader: MediaLoader, tmp_path: Path) -> None:
    image = pictures.gradient()
    (tmp_path / "a.png").write_bytes(pictures.encoded(image))
    pixels = np.asarray(image)
    alpha = np.dstack([pixels, np.full((5, 7), 9, np.uint8)])
    given = [tmp_path / "a.png", image, pixels, alpha]
    assert [loader.load(each).tobytes() for each in given] == 4 * [image.tobytes()]
    grey = loader.load(pixels[:, :, 0])
    assert np.array_equal(np.asarray(grey), np.dstack(3 * [pixels[:, :, 0]]))
    turned = pictures.gradient()
    turned.getexif()[0x0112] = 6
    assert loader.load(turned).size == (5, 7)
    assert turned.size == (7, 5)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((5, 7, 3), np.float32), r"got float32 \[5, 7, 3\]"),
        (np.zeros((3, 5, 7), np.uint8), r"got uint8 \[3, 5, 7\]"),
        (np.zeros((0, 7), np.uint8), r"got uint8 \[0, 7\]"),
        (3, "got int"),
    ],
)
def test_other_arrays_are_refused(loader: MediaLoader, array: object, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        loader.load(array)  # type: ignore[arg-type]


GOOD = pictures.encoded(pictures.gradient())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "expected a data:"),
        ("cat.png", "expected a data:"),
        ("/etc/passwd", "expected a data:"),
        ("ftp://example.com/a.png", "expected a data:"),
        ("data:,abc", "expected data:image/TYPE;base64,DATA, got 'data:,abc'"),
        ("data:image/png,abc", "expected data:image/TYPE;base64,DATA"),
        ("data:image/png;base64", "expected data:image/TYPE;base64,DATA"),
        ("data:image/png;charset=x;base64,aaaa", "expected data:image/TYPE;base64,DATA"),
        ("data:" + "a" * 10**6, "expected data:image/TYPE;base64,DATA"),
        ("data:image/png;base64,", "the file is empty"),
        ("data:image/png;base64,!!!!", "not base64"),
        ("data:image/png;base64,aGVsbG8=\n", "not base64"),
        ("data:image/png;base64,aGVsbG8", "not base64"),
        ("data:image/png;base64,aGVsbG8=aGVsbG8=", "not base64"),
        ("data:image/png;base64,ünïcödé=", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "the file is not an image; expected one of PNG, JPEG"),
        (url_of(GOOD, "text/plain"), "'text/plain' is not a type of images that are taken"),
        (url_of(pictures.SVG, "image/svg+xml"), r"'image/svg\+xml' is not a type of images"),
        (url_of(pictures.SVG), "the file is SVG"),
        (url_of(b"%PDF-1.7"), "the file is not an image"),
        (url_of(b"MM\0*\0\0\0\x08", "image/tiff"), "'image/tiff' is not a type of images"),
        (url_of(GOOD, "image/jpeg"), "the file is PNG, but was sent as JPEG"),
        (url_of(b"\xff\xd8\xff\xd9", "image/jpeg"), "the JPEG file is damaged or cut"),
    ],
)
def test_what_is_no_image(loader: MediaLoader, url: str, said: str) -> None:
    with pytest.raises(MediaError, match=said) as caught:
        loader.load(url)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("format", FORMATS)
def test_cut_files(loader: MediaLoader, format: str) -> None:
    """Cut anywhere: an error, or only what no pixel depends on is missing."""
    image = pictures.gradient(40, 30)
    data = pictures.encoded(image, format)
    whole = loader.load(data).tobytes()
    num_refused = 0
    for size in range(len(data)):
        try:
            assert loader.load(data[:size]).tobytes() == whole
        except MediaError:
            num_refused += 1
    assert num_refused > 0.8 * len(data)


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files_raise_nothing_else(loader: MediaLoader, format: str) -> None:
    data = bytearray(pictures.encoded(pictures.gradient(20, 15), format))
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        with contextlib.suppress(MediaError):
            loader.load(bytes(damaged))


JPEG = pictures.encoded(pictures.gradient(), "JPEG")
GIF = pictures.encoded(pictures.gradient(), "GIF")
EXIF = b"\xff\xe1\xff\xff" + b"Exif\0\0".ljust(65533, b"x")
ZEROS = pictures.deflated(300)
BOMBS = {
    "png": pictures.png_bomb(20_000, 20_000),
    "wide png": pictures.png_bomb(100_000, 100_000),
    "gif": pictures.gif_bomb((60_000, 60_000), (60_000, 60_000)),
    "gif frame": pictures.gif_bomb((1, 1), (60_000, 60_000)),
    "webp": b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xfe\x3f\0\xfe\x3f\0",
    "bmp": b"BM" + bytes(8) + struct.pack("<IIiiHHIIIIII", 54, 40, 10**5, 10**5, 1, 24, *6 * [0]),
    "scans": JPEG + 200 * b"\xff\xda",
    "exif": JPEG[:2] + 200 * EXIF + JPEG[2:],
    "png exif": GOOD[:33] + pictures.chunk(b"eXIf", pictures.exif_bomb(9000, 2**20)) + GOOD[33:],
    "png text": GOOD[:33] + pictures.chunk(b"zTXt", b"a\0\0" + ZEROS) + GOOD[33:],
    "png profile": GOOD[:33] + pictures.chunk(b"iCCP", b"a\0\0" + ZEROS) + GOOD[33:],
}
# Files of more parts than are gone through.
PARTS = 110_000
FRAME = b"\xff\xc0\0\x0b\x08\0\x01\0\x01\x01\x01\x11\0"
BOMBS |= {
    "png chunks": GOOD[:33] + PARTS * pictures.chunk(b"prVt", b"") + GOOD[33:],
    "png texts": GOOD[:33] + PARTS * pictures.chunk(b"tEXt", b"a\0") + GOOD[33:],
    "segments": JPEG[:2] + PARTS * b"\xff\xe0\0\x02" + JPEG[2:],
    "frames": JPEG[:2] + PARTS * FRAME + JPEG[2:],
    "junk": JPEG[:2] + PARTS * b"x" + JPEG[2:],
    "marks": JPEG[:2] + PARTS * b"\xff" + JPEG[2:],
    "comments": GIF[:13] + PARTS * b"!\xfe\x01x\0" + GIF[13:],
    "gif junk": GIF[:13] + PARTS * b"x" + GIF[13:],
    "runs": b"BM" + bytes(8) + struct.pack("<IIiiHHIIIIII", 54, 40, 9, 9, 1, 8, 1, *5 * [0]),
}
# An index of other images whose tags overlap; what is not looked at does no harm.
INDEX = b"MPF\0" + pictures.exif_bomb(2700, 65_000)[6:]
HARMLESS = {
    "index": JPEG[:2] + b"\xff\xe2" + struct.pack(">H", len(INDEX) + 2) + INDEX + JPEG[2:],
    "profile": pictures.encoded(pictures.gradient(), "WEBP", icc_profile=bytes(10**7)),
}
REFUSING = """
import pathlib, resource, sys
sys.path.insert(0, sys.argv[1])
from PIL import Image
from atom.multimodal.media import MediaError, MediaLoader, MediaPolicy
loader = MediaLoader(MediaPolicy())
Image.preinit()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
for path in sorted(pathlib.Path(sys.argv[2]).iterdir()):
    try:
        said = loader.load(path).size
    except MediaError as error:
        said = error
    print(path.name, said, peak() - before, sep=": ")
"""


def test_bombs_take_no_memory(tmp_path: Path) -> None:
    """They would take 1.2 to 30 GB; all of them together take less than twice the largest file."""
    for name, data in {**BOMBS, **HARMLESS}.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", REFUSING, str(Path(__file__).parents[2]), str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    said = {line.split(": ")[0]: line for line in lines}
    taken = {name for name, line in said.items() if "(7, 5)" in line}
    assert taken == HARMLESS.keys()
    assert said.keys() - taken == BOMBS.keys()
    assert "more than 50000000 pixels" in said["png"] + said["gif"]
    largest = max(map(len, BOMBS.values())) // 2**20
    assert int(lines[-1].rpartition(" ")[2]) < 2 * largest + 16, lines


def test_limits(tmp_path: Path) -> None:
    loader = MediaLoader(MediaPolicy(max_bytes=len(GOOD), max_pixels=35))
    assert loader.load(GOOD).size == (7, 5)
    assert loader.load(url_of(GOOD)).size == (7, 5)
    (tmp_path / "large").write_bytes(GOOD + b"x")
    for large in (GOOD + b"x", url_of(GOOD + b"xxx"), tmp_path / "large"):
        with pytest.raises(MediaError, match=f"more than the {len(GOOD)} bytes"):
            loader.load(large)
    for wide in (pictures.encoded(pictures.gradient(9, 4)), pictures.gradient(9, 4)):
        with pytest.raises(
            MediaError, match=r"9 x 4 pixels, and at most 35|more than the .* bytes"
        ):
            loader.load(wide)


def test_files_only_below_the_allowed_folder(tmp_path: Path) -> None:
    allowed, other = tmp_path / "a b", tmp_path / "a b c"
    (allowed / "sub").mkdir(parents=True)
    other.mkdir()
    for folder in (allowed / "sub", other):
        (folder / "x.png").write_bytes(GOOD)
    (allowed / "link").symlink_to(other)
    (allowed / "inside").symlink_to(allowed / "sub" / "x.png")
    os.mkfifo(allowed / "pipe")
    loader = MediaLoader(MediaPolicy(allowed_local_path=allowed))
    base = f"file://{tmp_path}/a%20b"
    for url in (f"{base}/sub/x.png", f"{base}/inside", f"{base}/sub/../sub/x.png"):
        assert loader.load(url).size == (7, 5)
    for url, said in (
        (f"{base}%20c/x.png", "not below"),
        (f"{base}/link/x.png", "not below"),
        (f"{base}/../a%20b%20c/x.png", "not below"),
        (f"{base}/%2e%2e/a%20b%20c/x.png", "not below"),
        (f"file://{tmp_path}", "not below"),
        ("file:///etc/passwd", "not below"),
        ("file:etc/passwd", "not the URL of a file"),
        (f"file://elsewhere{tmp_path}/a%20b/sub/x.png", "not the URL of a file"),
        (f"{base}/%00", "not the URL of a file|not below"),
        (f"{base}/pipe", "is not a file"),
        (f"{base}/sub", "is not a file"),
        (f"{base}/nothing", "is not a file"),
    ):
        with pytest.raises(MediaError, match=said):
            loader.load(url)
    with pytest.raises(MediaError, match="this server reads no files"):
        MediaLoader(MediaPolicy()).load(f"{base}/sub/x.png")
