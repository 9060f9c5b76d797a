"""Writes safetensors files tensor by tensor, several at once, without keeping the model in memory.

Source: the safetensors format; 8 bytes of header length, a JSON header, then the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
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


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


ReadTensor = Callable[[TensorSpec], Iterator[torch.Tensor]]


def write_checkpoint(
    folder: Path,
    tensors: Sequence[TensorSpec],
    read: ReadTensor,
    max_shard_bytes: int,
    pool: Executor,
) -> None:
    """Write `model.safetensors`, or several shards with an index if it is too large.

    Args:
        read: yields a tensor's values in its dtype and in row-major order, in pieces of any size.
        max_shard_bytes: exceeded only by a shard with a single tensor.
        pool: reads and writes the tensors of a file, each by itself.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0], read, pool)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard, read, pool)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


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


def _write_file(
    path: Path, tensors: Sequence[TensorSpec], read: ReadTensor, pool: Executor
) -> None:
    with path.open("wb", buffering=0) as out:
        header = _header(tensors)
        out.write(header)
        ends = accumulate((tensor.num_bytes for tensor in tensors), initial=len(header))

        def write(tensor: TensorSpec, start: int) -> None:
            at = start
            for piece in read(tensor):
                at += _write_values(out.fileno(), piece, at)
            assert at - start == tensor.num_bytes, tensor.name

        running = [pool.submit(write, *each) for each in zip(tensors, ends, strict=False)]
        try:
            for future in running:
                future.result()
        except BaseException:
            for future in running:
                future.cancel()
            wait(running)  # the file is open until the last of them has ended
            raise


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
    rest = memoryview(values.contiguous().flatten().view(torch.uint8).numpy().data)
    while rest:
        rest = rest[os.pwrite(file, rest, at + values.nbytes - len(rest)) :]
    return values.nbytes
