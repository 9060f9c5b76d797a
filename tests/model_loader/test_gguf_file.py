"""The header reader against the `gguf` package's writer, and against damaged files."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf_files import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.config import ConfigError
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf.file import read_gguf

WriteTiny = Callable[..., Path]


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Straße 😀")
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    metadata = read_gguf(path).metadata

    for key, value in {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
    }.items():
        assert metadata.require(key, int) == value
    # The shortest decimal, not 9.999999747378752e-06.
    assert metadata.require("f32", float) == 1e-5
    assert metadata.require("f64", float) == 0.1
    assert metadata.require("yes", bool) is True
    assert metadata.require("text", str) == "Straße 😀"
    assert metadata.require_list("texts", str) == ["a", "", "ü"]
    assert metadata.require_list("numbers", int) == [1, -2, 3]
    assert metadata.require_list("floats", float) == [0.5, -1.5]
    assert metadata.get("absent", int) is None
    assert metadata.get("absent", int, 3) == 3
    with pytest.raises(WeightError, match="lacks absent"):
        metadata.require("absent", str)
    with pytest.raises(WeightError, match="text should be of type int, got str"):
        metadata.require("text", int)
    with pytest.raises(WeightError, match="yes should be of type int, got bool"):
        metadata.get("yes", int)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_tensors_agree_with_the_reference_reader(write_tiny: WriteTiny, kind: str) -> None:
    path = write_tiny(kind=GGMLQuantizationType[kind])
    file = read_gguf(path)
    content = path.read_bytes()
    expected = GGUFReader(path).tensors
    assert list(file.tensors) == [t.name for t in expected]
    for tensor in expected:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert ours.kind == tensor.tensor_type
        raw = content[ours.offset : ours.offset + ours.num_bytes]
        assert raw == tensor.data.tobytes()
        assert ours.num_elements == tensor.n_elements


def test_cut_files_are_named_and_refused(write_tiny: WriteTiny, tmp_path: Path) -> None:
    content = write_tiny().read_bytes()
    header = min(t.offset for t in read_gguf(tmp_path / "tiny.gguf").tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 7, 12, 23, 24, 100, header // 2, header - 1, header, len(content) - 1]:
        cut.write_bytes(content[:size])
        with pytest.raises(WeightError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_a_cut_tensor_is_named(write_tiny: WriteTiny) -> None:
    path = write_tiny()
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(
        WeightError, match=r"tensor output\.weight ends at byte \d+, the file at \d+"
    ):
        read_gguf(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")],
)
def test_versions(write_tiny: WriteTiny, version: int, message: str) -> None:
    path = write_tiny()
    content = bytearray(path.read_bytes())
    content[4:8] = version.to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_gguf(path)


def test_something_else_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<!doctype html>")
    with pytest.raises(WeightError, match="is no GGUF file"):
        read_gguf(path)


def test_duplicate_tensors(tmp_path: Path) -> None:
    path = tmp_path / "twice.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("one", np.zeros(4, np.float32))
    writer.add_tensor("two", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes().replace(b"two", b"one"))
    with pytest.raises(WeightError, match="twice"):
        read_gguf(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from gguf_files import metadata_of, write_gguf

    model = tiny_model(num_hidden_layers=1)
    metadata = metadata_of(model) | {"texts": ["a", "bc"], "numbers": [1, 2, 3]}
    path = write_gguf(tmp_path_factory.mktemp("fuzz") / "small.gguf", model, metadata)
    header = min(t.offset for t in read_gguf(path).tensors.values())
    return path.read_bytes()[: header + 64]


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(
    small_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(4, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    path.write_bytes(content)
    with contextlib.suppress(WeightError, ConfigError):
        assert not read_gguf(path).tensors  # a file may hold nothing but metadata


def header(num_tensors: int, num_values: int, rest: bytes = b"") -> bytes:
    """A GGUF file from its numbers."""
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + rest


def string(text: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text


def array_of(kind: GGUFValueType, length: int, rest: bytes = b"") -> bytes:
    return string(b"key") + struct.pack("<IIQ", GGUFValueType.ARRAY, kind, length) + rest


def tensor_info(name: bytes, shape: list[int], offset: int = 0, dimensions: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    count = struct.pack("<I", dimensions or len(shape))
    return string(name) + count + sizes + struct.pack("<IQ", GGMLQuantizationType.F32, offset)


NESTED = struct.pack("<IQ", GGUFValueType.ARRAY, 1) * 100_000
FLAG = string(b"key") + struct.pack("<I?", GGUFValueType.BOOL, True)

LIES = {
    "tensors without end": header(1 << 60, 0),
    "values without end": header(0, 1 << 60),
    "more of both than a number holds": header((1 << 64) - 1, (1 << 64) - 1),
    "a string without end": header(0, 1, string(b"", 1 << 60)),
    "a list without end": header(0, 1, array_of(GGUFValueType.UINT64, 1 << 61)),
    "a list of strings without end": header(0, 1, array_of(GGUFValueType.STRING, 1 << 61)),
    "lists in lists": header(0, 1, array_of(GGUFValueType.ARRAY, 1, NESTED)),
    "a key twice": header(0, 2, FLAG + FLAG),
    "dimensions without end": header(1, 0, tensor_info(b"t", [4], dimensions=(1 << 32) - 1)),
    "too many dimensions": header(1, 0, tensor_info(b"t", [1] * 5)),
    "a product beyond 64 bits": header(1, 0, tensor_info(b"t", [1 << 33, 1 << 33])),
    "a product that wraps to nothing": header(1, 0, tensor_info(b"t", [1 << 32, 1 << 32])),
    "an offset without end": header(1, 0, tensor_info(b"t", [4], offset=(1 << 64) - 32)),
    "tensors that overlap": header(
        2, 0, tensor_info(b"a", [4, 4]) + tensor_info(b"b", [4, 4], offset=32)
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(tmp_path: Path, name: str) -> None:
    path = tmp_path / "lie.gguf"
    path.write_bytes(LIES[name] + b"\0" * 256)
    with pytest.raises(WeightError, match=r"lie\.gguf is damaged"):
        read_gguf(path)


@pytest.mark.parametrize(
    "lie",
    [
        array_of(GGUFValueType.UINT8, 1 << 30),
        array_of(GGUFValueType.STRING, 1 << 27),
        string(b"key") + struct.pack("<IQ", GGUFValueType.STRING, 1 << 30),
    ],
)
def test_large_headers_are_not_read(tmp_path: Path, lie: bytes) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(header(0, 1, lie))
    with path.open("r+b") as file:
        file.truncate(2 << 30)  # a hole: takes no room
    with pytest.raises(WeightError, match="header is larger than 100000000 bytes"):
        read_gguf(path)


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_tensors_begin_at_the_alignment_that_the_file_says(
    tmp_path: Path, alignment: int | None
) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    values = {name: np.arange(3, dtype=np.float32) + i for i, name in enumerate("ab")}
    for name, tensor in values.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    for name, tensor in read_gguf(path).tensors.items():
        assert tensor.offset % (alignment or 32) == 0
        stored = data[tensor.offset : tensor.offset + tensor.num_bytes]
        assert stored == values[name].tobytes(), name
