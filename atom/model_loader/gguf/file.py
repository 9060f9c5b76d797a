"""Reads the header of a GGUF file: metadata and tensor locations.

Source of the format: `gguf.constants` and ggml's `docs/gguf.md`. A header can have hundreds of
thousands of strings, so it is decoded in one pass over a memory map, without an object per field.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from atom.config import ConfigError
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.gguf.content import files_identity
from atom.model_loader.gguf.split import split_paths
from atom.models.config.file import check_regular

_MAGIC = b"GGUF"
_LENGTH = struct.Struct("<Q")
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SMALLEST_STRING = 8
_SMALLEST_VALUE = 13
_SMALLEST_TENSOR_INFO = 24
# The same limit as safetensors; the largest published vocabularies need a tenth of it.
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 4

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True)
class GGUFTensor:
    """Attributes:
    shape: outermost dimension first.
    kind: storage type of the elements.
    path: of the file that holds it.
    offset: of the first byte, from the start of the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Rows along the innermost dimension, which is quantised in blocks."""
        return self.num_elements // self.shape[-1]


class Metadata:
    """The key-value pairs of a GGUF file, with type-checked access."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...
    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value; the default if the key is absent.

        Raises:
            WeightError: when the value has another type.
        """
        value = self._values.get(key, default)
        return value if value is None else self._checked(key, value, kind)

    def require(self, key: str, kind: type[T]) -> T:
        """The value.

        Raises:
            WeightError: when it is absent or has another type.
        """
        if key not in self._values:
            raise WeightError(f"{self._path}: the metadata lacks {key}")
        return self._checked(key, self._values[key], kind)

    def require_list(self, key: str, kind: type[T]) -> list[T]:
        """A list value.

        Raises:
            WeightError: when it is absent, no list, or its items have another type.
        """
        value = self._values.get(key)
        if not isinstance(value, list):
            raise WeightError(f"{self._path}: the metadata lacks the list {key}")
        return [self._checked(key, item, kind) for item in value]

    def _checked(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and type(value) is int:
            return kind(value)
        if type(value) is not kind:
            raise WeightError(
                f"{self._path}: {key} should be of type {kind.__name__}, got {type(value).__name__}"
            )
        return value


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file.

    Attributes:
        path: of the first file, if there are several.
        tensors: of all files.
        identity: what the files were when this was read, as `files_identity` names it.
    """

    path: Path
    metadata: Metadata
    tensors: dict[str, GGUFTensor]
    identity: str = ""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return split_paths(self.path)

    @property
    def architecture(self) -> str:
        return self.metadata.require("general.architecture", str)


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's header and check that every tensor lies within the file; the headers of
    all files, if the model is split.

    Raises:
        ConfigError: for an unsupported GGUF version, byte order or tensor type, or a missing file.
        WeightError: when the file is not a GGUF file, truncated or damaged.
    """
    paths = split_paths(path)
    missing = [part.name for part in paths if not part.is_file()]
    if len(paths) > 1 and missing:
        raise ConfigError(f"{path} is one of {len(paths)} files; missing: {name_some(missing)}")
    identity = files_identity(paths)
    first, *others = (_read_header(part) for part in paths)
    stated = first.metadata.get("split.count", int, 1)
    if stated > 1 and stated != len(paths):
        raise ConfigError(
            f"{path} is one of {stated} files, which should be called "
            f"NAME-00001-of-{stated:05}.gguf and so on"
        )
    tensors = dict(first.tensors)
    for other in others:
        if twice := tensors.keys() & other.tensors.keys():
            raise WeightError(f"{other.path} holds {name_some(sorted(twice))} once more")
        tensors |= other.tensors
    return replace(first, tensors=tensors, identity=identity)


def _read_header(path: Path) -> GGUFFile:
    check_regular(path)
    with path.open("rb") as handle:
        if handle.read(len(_MAGIC)) != _MAGIC:
            raise WeightError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).read()


class _HeaderReader:
    """Reads the header front to back; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = len(_MAGIC)

    def read(self) -> GGUFFile:
        version = self.scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big")
            what = "big-endian" if swapped in _VERSIONS else f"version {version}"
            raise ConfigError(f"{self.path} is a {what} GGUF file; versions 2 and 3 are read")
        num_tensors, num_values = self.scalar("Q"), self.scalar("Q")
        self.expect(num_values * _SMALLEST_VALUE)
        values = {}
        for _ in range(num_values):
            key = self.string()
            if key in values:
                raise self.damaged(f"its metadata gives {key[:80]!r} twice")
            values[key] = self.value(self.value_type())
        metadata = Metadata(self.path, values)
        self.expect(num_tensors * _SMALLEST_TENSOR_INFO)
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", int, _DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"the alignment {alignment} is no power of two")
        start = -(-self.offset // alignment) * alignment
        tensors = {info[0]: self.tensor(start, *info) for info in infos}
        if len(tensors) != num_tensors:
            raise self.damaged("a tensor occurs twice")
        self.check_overlaps(tensors.values())
        return GGUFFile(self.path, metadata, tensors)

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        self.expect(size)
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += size
        # Undo the rounding to float32: use the shortest decimal that rounds to the stored value.
        return float(str(np.float32(value))) if code == "f" else value

    def string(self) -> str:
        size = self.scalar("Q")
        self.expect(size)
        raw = self.data[self.offset : self.offset + size]
        self.offset += size
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{raw[:40]!r} is not UTF-8") from None

    def strings(self, length: int) -> list[str]:
        """As `string` does, without the calls: a vocabulary has a hundred thousand."""
        self.expect(length * _SMALLEST_STRING)
        data, end, unpack = self.data, self.offset, _LENGTH.unpack_from
        most = min(len(data), _MOST_HEADER_BYTES)
        raw = []
        for _ in range(length):
            start = end + _SMALLEST_STRING
            if start <= most:
                end = start + unpack(data, start - _SMALLEST_STRING)[0]
            if max(start, end) > most:
                self.expect(max(start, end) - self.offset)
            raw.append(data[start:end])
        self.offset = end
        try:
            return [each.decode() for each in raw]
        except UnicodeDecodeError as error:
            raise self.damaged(f"{error.object[:40]!r} is not UTF-8") from None

    def value_type(self) -> GGUFValueType:
        number = self.scalar("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.damaged(f"there is no value type {number}") from None

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is GGUFValueType.ARRAY:
            return self.array()
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, length = self.value_type(), self.scalar("Q")
        if kind is GGUFValueType.ARRAY:
            raise self.damaged("its metadata nests lists in lists, which no key of a model does")
        if kind is GGUFValueType.STRING:
            return self.strings(length)
        item = np.dtype("<" + _SCALARS[kind])
        self.expect(length * item.itemsize)
        values = np.frombuffer(self.data, item, length, self.offset).tolist()
        self.offset += length * item.itemsize
        return list(values)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise self.damaged(f"tensor {name[:80]} has {num_dimensions} dimensions")
        innermost_first = [self.scalar("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(innermost_first)), self.scalar("I"), self.scalar("Q")

    def tensor(
        self, start: int, name: str, shape: tuple[int, ...], number: int, offset: int
    ) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ConfigError(
                f"{self.path}: tensor {name} is stored as type {number}, which this version of "
                f"the gguf package does not know"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise self.damaged(f"tensor {name} of shape {list(shape)} is no {kind.name} tensor")
        num_bytes = int(np.prod([int(n) for n in shape], dtype=object)) // block * block_bytes
        tensor = GGUFTensor(self.path, name, shape, kind, start + offset, num_bytes)
        if tensor.offset + tensor.num_bytes > len(self.data):
            raise self.damaged(
                f"tensor {name} ends at byte {tensor.offset + tensor.num_bytes}, the file at "
                f"{len(self.data)}; fetch it again"
            )
        return tensor

    def check_overlaps(self, tensors: Iterable[GGUFTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self.damaged(f"the tensors {before} and {tensor.name} overlap")
            end, before = tensor.offset + tensor.num_bytes, tensor.name

    def expect(self, size: int) -> None:
        """Check that `size` more bytes lie within the header limit and the file."""
        if len(self.data) >= self.offset + size > _MOST_HEADER_BYTES:
            raise self.damaged(f"its header is larger than {_MOST_HEADER_BYTES} bytes")
        if self.offset + size > len(self.data):
            raise self.damaged(f"its header is cut short at byte {len(self.data)}; fetch it again")

    def damaged(self, what: str) -> WeightError:
        return WeightError(f"{self.path} is damaged: {what}")
