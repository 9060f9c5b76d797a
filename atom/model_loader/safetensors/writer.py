"""Writes safetensors files tensor by tensor, several at once, without keeping the model in memory.

Source: the safetensors format; 8 bytes of header length, a JSON header, then the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
# Of the first tensor: what lines of the processors' caches have.
_ALIGNMENT = 64
_LENGTH_BYTES = 8
# In one call: as many as Linux takes.
_MOST_PARTS = 1024


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are read together.

    Attributes:
        read: yields the next values of each, in its dtype and in row-major order, in pieces of any
            size.
    """

    specs: tuple[TensorSpec, ...]
    read: Callable[[], Iterator[tuple[torch.Tensor, ...]]]


def write_checkpoint(
    folder: Path,
    tensors: Sequence[TensorSpec],
    groups: Sequence[TensorGroup],
    max_shard_bytes: int,
    pool: Executor,
    show: Callable[[int], None],
) -> None:
    """Write `model.safetensors`, or several shards with an index if it is too large.

    Args:
        tensors: in the order of the files.
        groups: each tensor is of one of them.
        max_shard_bytes: exceeded only by a shard with a single tensor.
        pool: reads and writes groups, each by itself.
        show: is told of bytes that were written.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [
            f"model-{number:05}-of-{len(shards):05}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        _write_index(folder, dict(zip(names, shards, strict=True)))
    with ExitStack() as files:
        places: dict[str, tuple[int, int]] = {}
        for name, shard in zip(names, shards, strict=True):
            out = files.enter_context((folder / name).open("wb", buffering=0))
            header = _header(shard)
            write_all(out.fileno(), [memoryview(header)], 0)
            ends = accumulate((tensor.num_bytes for tensor in shard), initial=len(header))
            places |= {each.name: (out.fileno(), at) for each, at in zip(shard, ends, strict=False)}
        _write_groups(groups, places, pool, show)


def _write_index(folder: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
    index = {
        "metadata": {"total_size": sum(each.num_bytes for of in files.values() for each in of)},
        "weight_map": {tensor.name: name for name, of in files.items() for tensor in of},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_groups(
    groups: Sequence[TensorGroup],
    places: Mapping[str, tuple[int, int]],
    pool: Executor,
    show: Callable[[int], None],
) -> None:
    """Args:
    places: of each tensor, a file's descriptor and an offset.
    """

    def write(group: TensorGroup) -> None:
        at = [places[spec.name] for spec in group.specs]
        for pieces in group.read():
            at = [
                (file, start + _write_values(file, piece, start))
                for (file, start), piece in zip(at, pieces, strict=True)
            ]
            show(sum(piece.nbytes for piece in pieces))
        for spec, (_, end) in zip(group.specs, at, strict=True):
            assert end - places[spec.name][1] == spec.num_bytes, spec.name

    running = [pool.submit(write, group) for group in groups]
    try:
        for future in running:
            future.result()
    except BaseException:
        for future in running:
            future.cancel()
        wait(running)  # files are open until the last of them has ended
        raise


def _split(tensors: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    room = max_bytes
    for tensor in tensors:
        size = tensor.num_bytes
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def _header(tensors: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _write_values(file: int, values: torch.Tensor, at: int) -> int:
    """Write all bytes at an offset of a file -> how many they are."""
    data = values.contiguous().flatten().view(torch.uint8).numpy().data
    write_all(file, [memoryview(data)], at)
    return values.nbytes


def write_all(file: int, parts: list[memoryview], at: int) -> None:
    """Write one after the other, at an offset of a file, which may take less at a time than is
    given; the list is empty then.
    """
    while parts:
        written = os.pwritev(file, parts[:_MOST_PARTS], at)
        at += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if written:
            parts[0] = parts[0][written:]
