"""The pools of a paged KV cache, for any set of attention layers."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from atom.kv_cache.base import KVCacheMemoryError, num_spare_blocks
from atom.model_ops.attention.cached_attention import CachedAttention, StoredPart
from atom.model_ops.attention.kv_scale import FP8_TYPES
from atom.model_ops.attention.metadata import CacheTensor, KVCacheTensor

_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class _PoolLayout:
    """Layers that share a pool: their stored parts have the same names, shape and dtype.

    Attributes:
        names: of the parts.
        shape: of each part, for one token.
        dtype: of their elements.
        layer_ids: the layers that store them.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer_ids: list[int] = field(default_factory=list)

    def bytes_of(self, num_blocks: int, block_size: int) -> int:
        layer_elements = len(self.names) * math.prod(self.shape)
        return len(self.layer_ids) * num_blocks * block_size * layer_elements * self.dtype.itemsize


class PagedCache:
    """A `KVCacheBuilder` for a set of attention layers.

    Layers that store the same share one pool, [layers, parts, blocks, block_size, *shape]: keys and
    values are [layers, 2, blocks, block_size, kv_heads, head_dim]. With a single part the second
    dimension is dropped: latents are [layers, blocks, block_size, width]. Layers with other shapes
    have their own pool with the same block ids. FP8 pools have scales, [layers, parts] or [layers]
    float32.

    On a CPU keys and values lie block by block, each block's layers side by side: memory in use
    grows by whole blocks, so it can be in huge pages. Only one layer's part of one block is
    contiguous there.

    Tensors are named `kv_cache` and `kv_scale`, after `prefix`; those of further pools
    `kv_cache_2`, `kv_scale_2` and so on.

    Args:
        layers: by layer id.
        dtype: storage dtype, unless a layer has another one.
        prefix: of the tensor names.
        is_windowed: whether the layers have a window and this cache's blocks are for them alone.
    """

    def __init__(
        self,
        layers: Mapping[int, CachedAttention],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        is_windowed: bool = False,
    ) -> None:
        self._layers = layers
        self._block_size = block_size
        self._device = device
        self._prefix = prefix
        self._is_windowed = is_windowed
        self._pools = _pool_layouts(layers, dtype)
        self._views: dict[int, CacheTensor] = {}

    def compute_block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(pool.bytes_of(1, self._block_size) for pool in self._pools)

    def allocate_kv_cache_tensors(self, num_blocks: int) -> dict[str, torch.Tensor]:
        """Allocate zeroed pools of `num_blocks` plus spare blocks; replaces earlier ones."""
        tensors: dict[str, torch.Tensor] = {}
        parts: dict[int, dict[str, StoredPart]] = {layer_id: {} for layer_id in self._layers}
        for number, pool in enumerate(self._pools, start=1):
            suffix = "" if number == 1 else f"_{number}"
            stored = self._allocate_pool(pool, num_blocks)
            scales = self._scales(pool)
            for i, layer_id in enumerate(pool.layer_ids):
                for j, name in enumerate(pool.names):
                    scale = None if scales is None else scales[i, j : j + 1]
                    parts[layer_id][name] = StoredPart(stored[i, j], scale)
            only = len(pool.names) == 1
            tensors[f"{self._prefix}kv_cache{suffix}"] = stored[:, 0] if only else stored
            if scales is not None:
                tensors[f"{self._prefix}kv_scale{suffix}"] = scales[:, 0] if only else scales
        self._views = {i: layer.view_cache(parts[i]) for i, layer in self._layers.items()}
        if self._is_windowed:
            for i, view in self._views.items():
                assert isinstance(view, KVCacheTensor)
                self._views[i] = replace(view, is_windowed=True)
        return tensors

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> CacheTensor | None:
        """The layer's view of the current pools; None for a module that is not in this cache."""
        if self._layers.get(layer_id) is not module:
            return None
        return self._views[layer_id]

    def _allocate_pool(self, pool: _PoolLayout, num_blocks: int) -> torch.Tensor:
        """[layers, parts, blocks, block_size, *shape]."""
        blocks = num_blocks + num_spare_blocks(self._device)
        layers, block = (len(pool.layer_ids), len(pool.names)), (self._block_size, *pool.shape)
        if len(pool.names) == 1 or not lie_by_block(self._device):
            return zeroed_pool((*layers, blocks, *block), pool.dtype, self._device)
        stored = zeroed_pool((blocks, *layers, *block), pool.dtype, self._device, in_order=True)
        return stored.movedim(0, 2)

    def _scales(self, pool: _PoolLayout) -> torch.Tensor | None:
        """[layers, parts] float32; None unless the storage is FP8."""
        if pool.dtype not in FP8_TYPES:
            return None
        rows = []
        for layer_id in pool.layer_ids:
            layer = self._layers[layer_id]
            names = list(layer.stored_parts())
            scales = layer.stored_scales(pool.dtype)
            rows.append(scales[[names.index(name) for name in pool.names]])
        return torch.stack(rows)


def _pool_layouts(layers: Mapping[int, CachedAttention], storage: torch.dtype) -> list[_PoolLayout]:
    """The pools, in the order in which layers first need them."""
    pools: dict[tuple[tuple[str, ...], tuple[int, ...], torch.dtype], _PoolLayout] = {}
    for layer_id, layer in layers.items():
        names_of: dict[tuple[int, ...], list[str]] = {}
        for name, shape in layer.stored_parts().items():
            names_of.setdefault(shape, []).append(name)
        for shape, names in names_of.items():
            kind = tuple(names), shape, layer.storage_of(storage)
            pools.setdefault(kind, _PoolLayout(*kind)).layer_ids.append(layer_id)
    return list(pools.values())


def lie_by_block(device: torch.device) -> bool:
    """Whether keys and values lie block by block, layers within blocks, and not layer by layer."""
    return device.type == "cpu"


def zeroed_pool(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, in_order: bool = False
) -> torch.Tensor:
    """A zeroed pool. It must not be uninitialised, since a masked key must not be NaN.

    On a CPU the pages are only mapped, so memory is committed when blocks are first written, and
    start-up need not fill gigabytes.

    Args:
        in_order: whether it is filled from its beginning on, so that huge pages commit hardly more
            memory than others. Linux is asked for them then, and it begins at a page, so that rows
            of 64 bytes are in one line of a cache each.

    Raises:
        KVCacheMemoryError: when a CPU's process is refused so much.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = _zeroed_pages(num_bytes, in_order)
    except (MemoryError, OSError) as error:
        raise KVCacheMemoryError(
            f"this process may not have {num_bytes / 2**30:.1f} GiB more for a pool of its cache: "
            f"{error}; lower --kv-cache-memory or --gpu-memory-utilization, or raise what limits "
            f"it (ulimit -v, vm.overcommit_memory)"
        ) from error
    return torch.from_numpy(pages).view(dtype).view(shape)


def _zeroed_pages(num_bytes: int, in_order: bool) -> np.ndarray:
    if in_order and num_bytes >= _HUGE_PAGE_BYTES and sys.platform == "linux":
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, dtype=np.uint8)
    return np.zeros(num_bytes, dtype=np.uint8)
