"""Reads safetensors files: the header once, then tensors from memory maps, by their offsets.

A file must not become shorter while its tensors are read, since a map of bytes that are gone ends
the process with SIGBUS. Its size is checked before each map.

Source: the safetensors format; 8 bytes of header length, a JSON header, then the tensors without
gaps.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from atom.model_loader.errors import WeightError

LENGTH_BYTES = 8
# As in the format's own library.
MOST_HEADER_BYTES = 100_000_000
_REPLACE_IT = "fetch it again; one in the cache of converted files is made again once it is removed"
_MOST_DIMENSIONS = 8
_LARGEST_DIMENSION = 1 << 40
_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
_ITEM_BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8}
_ITEM_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8}
_ITEM_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U32": torch.uint32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Attributes:
    dtype: safetensors' name, such as `BF16`.
    offset: of the first byte, from the start of the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for dtypes that parameters never have."""
        return _DTYPES.get(self.dtype)


def read_header(file: Path, size: int) -> tuple[CheckpointTensor, ...]:
    """The tensors of a file of `size` bytes, in the order of their data.

    Raises:
        WeightError: unless the tensors fill the file, each with as many bytes as its dtype and
            shape take, without overlap.
    """
    try:
        start, header = _parse(file, size)
        header.pop("__metadata__", None)
        tensors = [_tensor(file, name, entry, start) for name, entry in header.items()]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
        end = start
        for tensor in tensors:
            if tensor.offset != end:
                raise ValueError(
                    f"{tensor.name} begins at byte {tensor.offset}, and what is before it ends "
                    f"at byte {end}"
                )
            end += tensor.num_bytes
        if end != size:
            raise ValueError(f"its header describes {end} bytes")
    except (ValueError, RecursionError, OSError) as error:
        raise WeightError(
            f"{file} is damaged or incomplete ({size} bytes): {error}; {_REPLACE_IT}"
        ) from error
    return tuple(tensors)


def _parse(file: Path, size: int) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and the header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if length > min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
            raise ValueError(f"it says that its header has {length} bytes")
        header = json.loads(opened.read(length).decode())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return LENGTH_BYTES + length, header


def _tensor(file: Path, name: str, entry: Any, data: int) -> CheckpointTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(span) and len(span) == 2):
        raise ValueError(f"{name} is not described by a dtype, a shape and two offsets")
    if dtype not in _ITEM_BITS:
        raise ValueError(f"{name} is stored as {dtype}, which is no dtype of the format")
    # The size of an empty tensor is not bounded by the file.
    if len(shape) > _MOST_DIMENSIONS or any(n > _LARGEST_DIMENSION for n in shape):
        raise ValueError(f"{name} has {len(shape)} dimensions of up to {max(shape)}; no tensor has")
    num_bits = math.prod(shape) * _ITEM_BITS[dtype]
    if num_bits != (span[1] - span[0]) * 8:
        raise ValueError(
            f"{name} {shape} of {dtype} takes {num_bits / 8:g} bytes, and its offsets are {span}"
        )
    return CheckpointTensor(name, file, dtype, tuple(shape), data + span[0], span[1] - span[0])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


class WeightFile:
    """An open safetensors file; the values of its tensors are read where somebody uses them.

    Raises:
        WeightError: when it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise WeightError(f"{path} cannot be opened: {error.strerror}") from error

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def map(self, tensors: Sequence[CheckpointTensor]) -> list[torch.Tensor]:
        """Map the bytes of some tensors, from the first to the last of them.

        They are unmapped with the last of the results that is freed, so that pages that were read
        do not stay in the process's memory. Nobody may write to the results.

        Args:
            tensors: of this file, as `read_header` found them; at least one.

        Raises:
            WeightError: when the file has become shorter, cannot be mapped, or holds a dtype that
                parameters never have.
        """
        start = min(tensor.offset for tensor in tensors)
        start -= start % mmap.ALLOCATIONGRANULARITY
        end = max(tensor.offset + tensor.num_bytes for tensor in tensors)
        try:
            memory = self._map_bytes(start, end)
        except ValueError as error:
            raise WeightError(f"{self._path} cannot be read: {error}; {_REPLACE_IT}") from error
        except OSError as error:
            raise WeightError(
                f"{self._path}: {end - start} bytes cannot be mapped: {error.strerror}; the limits "
                f"of this process (ulimit -v, -n) and vm.overcommit_memory bound that"
            ) from error
        return [_view(memory, tensor, start) for tensor in tensors]

    def _map_bytes(self, start: int, end: int) -> mmap.mmap:
        number = self._file.fileno()
        if (size := os.fstat(number).st_size) < end:
            raise ValueError(f"it has {size} bytes now, and its header described {end} or more")
        if start == end:  # of empty tensors; 0 would stand for the whole file
            return mmap.mmap(-1, 1)
        # torch warns of memory that it may not write to. A write would change a copy of the page.
        return mmap.mmap(number, end - start, access=mmap.ACCESS_COPY, offset=start)


def map_tensor(tensor: CheckpointTensor) -> torch.Tensor:
    """Map a single tensor; see `WeightFile.map`."""
    with WeightFile(tensor.file) as file:
        return file.map([tensor])[0]


def _view(memory: mmap.mmap, tensor: CheckpointTensor, start: int) -> torch.Tensor:
    """Args:
    start: where the map starts in the file, in bytes.
    """
    dtype = tensor.torch_dtype
    if dtype is None:
        raise WeightError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}, which is not supported"
        )
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    count, offset = math.prod(tensor.shape), tensor.offset - start
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tensor.shape)
