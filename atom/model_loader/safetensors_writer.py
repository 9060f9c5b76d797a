"""Writes safetensors files tensor by tensor, without keeping the model in memory.

Source: the safetensors format; 8 bytes of header length, a JSON header, then the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_ALIGNMENT = 8


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
) -> None:
    """Write `model.safetensors`, or several shards with an index if it is too large.

    Args:
        read: yields a tensor's values in its dtype and in row-major order, in pieces of any size.
        max_shard_bytes: exceeded only by a shard with a single tensor.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0], read)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard, read)
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


def _write_file(path: Path, tensors: Sequence[TensorSpec], read: ReadTensor) -> None:
    with path.open("wb") as out:
        out.write(_header(tensors))
        for tensor in tensors:
            written = sum(_write_values(out, piece) for piece in read(tensor))
            assert written == tensor.num_bytes, tensor.name


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
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_values(out: BinaryIO, values: torch.Tensor) -> int:
    return out.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
