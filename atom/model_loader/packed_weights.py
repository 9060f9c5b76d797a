"""Packed weights are kept beside the converted GGUF file that they were made of.

A start then reads them as they lie (`packed_file`), instead of packing the stored matrices again.
The name of such a file is a digest of all that its content depends on: which tensors are loaded
where, the layers' formats, ops and cuts, the kernels with the processor they were compiled for, and
the code that packs. So nothing in it is ever out of date; what a start cannot use, it makes anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atom.environment import cache_limit
from atom.model_loader.gguf.cache import PACKED_SUFFIX, make_room, packed_files
from atom.model_loader.packed_file import (
    ALIGNMENT,
    Header,
    PackedEntry,
    PackedFileError,
    TensorEntry,
    checked_sum,
    encode_header,
    read_packed,
)
from atom.model_loader.placement import Placement
from atom.model_loader.safetensors.writer import write_all
from atom.model_loader.threads import single_threaded_pool
from atom.model_ops.kernels.native.bindings import constant
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.quant.pack import PackedWeights
from atom.model_ops.moe import FusedMoE
from atom.model_ops.stacked import PreparedMatrix
from atom.processors import default_num_threads

logger = logging.getLogger(__name__)

# Beside one converted file: for two processors or settings that take turns.
_MOST_FILES = 2
_MAX_THREADS = 8
# At a time: some huge pages.
_WRITTEN_BYTES = 8 << 20
_SPARE_BYTES = 64 * 1000**2
_TENSORS = ("codes", "scale", "shift", "super_scale", "super_offset", "order")
_MODEL_OPS = Path(__file__).parents[1] / "model_ops"
# What decides about the bits of packed weights, besides the kernels.
_CODE = ("stacked.py", "moe.py", "quant/**/*.py", "kernels/native/quant/*.py")

Prepares = PreparedMatrix | FusedMoE


@dataclass(frozen=True)
class PackedCache:
    """Attributes:
    path: of a model's packed weights, whether the file is there or not.
    modules: those that prepare weights, by name.
    """

    path: Path
    modules: Mapping[str, Prepares]

    def restore(self, placements: Sequence[Placement]) -> list[Placement] | None:
        """Give modules the weights of the file -> the placements that are left to load; None if it
        cannot be used, and nothing has changed then.
        """
        if not self.path.exists():
            return None
        try:
            file = read_packed(self.path, default_num_threads())
            values = file.values()
        except (PackedFileError, OSError) as error:
            logger.warning("%s is not used, and made anew: %s", self.path, error)
            with contextlib.suppress(OSError):  # a file system that is only read
                self.path.unlink()
            return None
        with contextlib.suppress(OSError):  # of another user, or removed by an engine meanwhile
            os.utime(self.path)
        loaded: dict[int, frozenset[str]] = {}
        for name, entries in file.header.layers.items():
            module = self.modules[name]
            loaded[id(module)] = module.restore(tuple(_weights(each, values) for each in entries))
        return [
            placement
            for placement in placements
            if placement.target.parameter_name not in loaded.get(id(placement.target.module), ())
        ]

    def save(self) -> None:
        """Write what the modules have prepared; where there is no room for it, nothing."""
        layers = {
            name: module.prepared
            for name, module in self.modules.items()
            if module.prepared and all(isinstance(p, PackedWeights) for p in module.prepared)
        }
        if not layers:
            return
        header, tensors = _describe(layers)
        needed = header.num_bytes + _SPARE_BYTES
        folder = self.path.parent
        try:
            for old in packed_files(folder)[_MOST_FILES - 1 :]:
                old.unlink(missing_ok=True)
            has_room = make_room(folder.parent, needed, cache_limit())
            if not has_room or shutil.disk_usage(folder).free < needed:
                logger.info("packed weights are not kept: no room for %.1f GB", needed / 1e9)
                return
            with _temporary(self.path) as temporary:
                _write(temporary, header, tensors)
                temporary.rename(self.path)
        except (PackedFileError, OSError) as error:
            logger.warning("packed weights are not kept: %s", error)
        else:
            logger.info("packed weights are kept for further starts: %.2f GB", needed / 1e9)


def packed_cache(
    folder: Path, model: nn.Module, placements: Sequence[Placement]
) -> PackedCache | None:
    """Of a model whose converted files lie in a folder; None where nothing is packed by kernels."""
    library = native_build().library
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Prepares) and module.prepared_from()
    }
    if library is None or not any(m.choice.name == "native" for m in modules.values()):
        return None
    names = {id(module): name for name, module in modules.items()}
    parts = [library._name.rpartition("/")[2], _code(), *map(_constant, ("lanes", "has_tiles"))]
    parts += [f"{name} {module.prepared_from()}" for name, module in modules.items()]
    parts += [
        f"{placement.tensor.name} {name} {placement.target.parameter_name} {placement.shard}"
        for placement in placements
        if (name := names.get(id(placement.target.module))) is not None
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return PackedCache(folder / f"{digest}{PACKED_SUFFIX}", modules)


def _constant(name: str) -> str:
    return f"{name} {constant(name)}"


def _code() -> str:
    digest = hashlib.sha256()
    files = [path for pattern in _CODE for path in sorted(_MODEL_OPS.glob(pattern))]
    for path in [*files, Path(__file__)]:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _weights(entry: PackedEntry, values: memoryview) -> PackedWeights:
    tensors = {name: _view(of, values) for name, of in entry.tensors.items()}
    others: dict[str, Any] = dict.fromkeys(_TENSORS)
    return PackedWeights(**others | tensors, sizes=entry.sizes, fixed_scale=entry.fixed_scale)


def _view(entry: TensorEntry, values: memoryview) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    count = torch.Size(entry.shape).numel()
    return torch.frombuffer(values, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


def _describe(
    layers: Mapping[str, tuple[PackedWeights, ...]],
) -> tuple[Header, list[tuple[int, torch.Tensor]]]:
    """The header, without the sum, and the tensors with their places."""
    fields = [
        (name, i, of, tensor)
        for name, prepared in layers.items()
        for i, packed in enumerate(prepared)
        for of in _TENSORS
        if (tensor := getattr(packed, of)) is not None
    ]
    sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for *_, tensor in fields)
    ends = list(accumulate(sizes, initial=0))
    entries: dict[tuple[str, int], dict[str, TensorEntry]] = {}
    for (name, i, of, tensor), offset in zip(fields, ends, strict=False):
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = TensorEntry(dtype, tuple(tensor.shape), offset)
        entries.setdefault((name, i), {})[of] = entry
    described = {
        name: tuple(
            PackedEntry(entries[name, i], tuple(map(int, packed.sizes)), packed.fixed_scale)
            for i, packed in enumerate(prepared)
        )
        for name, prepared in layers.items()
    }
    tensors = [(offset, field[3]) for field, offset in zip(fields, ends, strict=False)]
    return Header(ends[-1], "0" * 16, described), tensors


def _write(path: Path, header: Header, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Write a file, and the sum of the bytes that are in it.

    Whole huge pages are written at a time: so the file system keeps them as such.
    """
    start = len(encode_header(header))
    num_threads = min(_MAX_THREADS, default_num_threads())
    pieces = [(at, memoryview(_bytes_of(tensor).numpy().data)) for at, tensor in tensors]
    places = [at for at, _ in pieces]
    zeros = memoryview(bytes(ALIGNMENT))
    with path.open("r+b", buffering=0) as file:

        def write(begin: int) -> None:
            end = min(begin + _WRITTEN_BYTES, header.num_bytes)
            parts = []
            for at, values in pieces[bisect_right(places, begin) - 1 : bisect_left(places, end)]:
                until = min(at + -(-len(values) // ALIGNMENT) * ALIGNMENT, end)
                gap = until - max(at + len(values), begin)
                parts += [values[max(begin - at, 0) : end - at], zeros[: max(gap, 0)]]
            write_all(file.fileno(), parts, start + begin)

        with single_threaded_pool(num_threads) as pool:
            for _ in pool.map(write, range(0, header.num_bytes, _WRITTEN_BYTES)):
                pass
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        total = checked_sum(memoryview(memory)[start:], num_threads)
        summed = encode_header(Header(header.num_bytes, total, header.layers))
        write_all(file.fileno(), [memoryview(summed)], 0)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, which is removed if it is there at the end; so are those that
    killed processes left behind.
    """
    for left in path.parent.glob(f".*{PACKED_SUFFIX}.tmp-*"):
        _remove_unless_locked(left)
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
