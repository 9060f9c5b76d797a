"""How the engine sees a KV cache: who owns it, how it is stored, how many blocks there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from atom.config import CacheOptions
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.metadata import CacheTensor


class KVCacheBuilder(Protocol):
    """Owns the KV cache of a model or a draft. All builders share block ids and block size."""

    def compute_block_bytes(self) -> int:
        """Bytes that one block takes over all layers that the builder serves."""
        ...

    def allocate_kv_cache_tensors(self, num_blocks: int) -> dict[str, torch.Tensor]:
        """Allocate pools and their spare blocks; the keys are unique over all builders."""
        ...

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> CacheTensor | None:
        """The view for one attention module; None when the builder does not serve it."""
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
