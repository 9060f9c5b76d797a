"""The paged KV cache: how much of it there is, who allocates it, which layer gets what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from atom.config import CacheOptions
from atom.model_ops.attention_mha import Attention
from atom.model_ops.kv_scale import FP8_TYPES
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.metadata import CacheTensor, KVCacheTensor


class KVCacheBuilder(Protocol):
    """Owns one kind of KV cache. All builders share block ids and block size.

    A new kind of cache (another attention, a draft) is a new builder and nothing else.
    """

    def compute_block_bytes(self) -> int:
        """Bytes that one block takes over all layers of this kind."""
        ...

    def allocate_kv_cache_tensors(self, num_blocks: int) -> dict[str, torch.Tensor]:
        """Allocate the pool and its spare blocks; the keys are unique over all builders."""
        ...

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> CacheTensor | None:
        """The view for one attention module; None when the module is not of this kind."""
        ...


def storage_dtype(options: CacheOptions, context: LayerContext) -> torch.dtype:
    """The type that keys, values and latents are stored in."""
    if options.kv_cache_dtype == "auto":
        return context.dtype
    return torch.bfloat16 if options.kv_cache_dtype == "bf16" else context.ops.platform.fp8_dtype


def num_spare_blocks(device: torch.device) -> int:
    """Blocks at the end of a pool that no sequence owns.

    Slot -1 writes nothing. A GPU sends such rows to the last slot of a spare block: finding out
    which rows they are would make the host wait, and a graph cannot be captured around that.
    """
    return 0 if device.type == "cpu" else 1


class KVCacheMemoryError(RuntimeError):
    """There is too little memory for the KV cache; the message holds the numbers."""


@dataclass(frozen=True)
class KVCachePlan:
    """Attributes:
    num_blocks: blocks of the pool.
    block_bytes: bytes of one block over all builders.
    """

    num_blocks: int
    block_bytes: int


def plan_kv_cache(
    budget_bytes: int,
    block_bytes: Sequence[int],
    block_size: int,
    max_tokens: int,
    num_spare: int = 0,
) -> KVCachePlan:
    """Turn a memory budget into a number of blocks.

    Args:
        budget_bytes: memory that the pool may take.
        block_bytes: bytes of a block, one entry per builder.
        block_size: tokens of a block.
        max_tokens: tokens that can ever be alive at once (a larger pool serves nobody).
        num_spare: blocks that the budget must hold beside those of the plan.

    Raises:
        KVCacheMemoryError: when not even one block fits.
    """
    per_block = sum(block_bytes)
    num_blocks = min(budget_bytes // per_block - num_spare, -(-max_tokens // block_size))
    if num_blocks < 1:
        raise KVCacheMemoryError(
            f"a KV cache budget of {budget_bytes} bytes holds no block of {block_size} tokens "
            f"({per_block} bytes); raise --kv-cache-memory or --gpu-memory-utilization"
        )
    return KVCachePlan(num_blocks, per_block)


def zero_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A pool of zeros: never uninitialised, since a masked key must not be NaN.

    On a CPU the pages are mapped and not written, so that memory is taken as blocks come into
    use; filling gigabytes at the start would take many seconds.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


class MHACacheBuilder:
    """The target's keys and values: [layers, 2, blocks, block_size, kv_heads, head_dim].

    Of 8 bits they have scales beside them, [layers, 2] float32.
    """

    key = "kv_cache"
    scale_key = "kv_scale"

    def __init__(
        self,
        modules: dict[int, Attention],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._modules = modules
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._layers: dict[int, KVCacheTensor] = {}

    def _block_shape(self, module: Attention) -> tuple[int, int, int]:
        return self._block_size, module.num_kv_heads, module.head_dim

    def compute_block_bytes(self) -> int:
        elements = sum(
            2 * self._block_size * m.num_kv_heads * m.head_dim for m in self._modules.values()
        )
        return elements * self._dtype.itemsize

    def allocate_kv_cache_tensors(self, num_blocks: int) -> dict[str, torch.Tensor]:
        first = next(iter(self._modules.values()))
        blocks = num_blocks + num_spare_blocks(self._device)
        shape = (len(self._modules), 2, blocks, *self._block_shape(first))
        pool = zero_pool(shape, self._dtype, self._device)
        if self._dtype not in FP8_TYPES:
            self._layers = {
                layer_id: KVCacheTensor(pool[i, 0], pool[i, 1])
                for i, layer_id in enumerate(self._modules)
            }
            return {self.key: pool}
        modules = self._modules.values()
        scales = torch.stack([m.kv_scale.of_keys_and_values(self._dtype) for m in modules])
        self._layers = {
            layer_id: KVCacheTensor(pool[i, 0], pool[i, 1], scales[i, :1], scales[i, 1:])
            for i, layer_id in enumerate(self._modules)
        }
        return {self.key: pool, self.scale_key: scales}

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> KVCacheTensor | None:
        if self._modules.get(layer_id) is not module:
            return None
        return self._layers[layer_id]
