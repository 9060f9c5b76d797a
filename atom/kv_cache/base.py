"""KV cache protocol, storage dtype and sizing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from atom.config import CacheOptions
from atom.model_ops.attention.metadata import CacheTensor
from atom.model_ops.layer_context import LayerContext


class KVCacheBuilder(Protocol):
    """The KV cache of a model or draft. All builders share block ids and block size."""

    def compute_block_bytes(self) -> int:
        """Bytes of one block over all of its layers."""
        ...

    def allocate_kv_cache_tensors(self, num_blocks: int) -> dict[str, torch.Tensor]:
        """Allocate the pools, spare blocks included. Names are unique over all builders."""
        ...

    def build_kv_cache_tensor(self, layer_id: int, module: nn.Module) -> CacheTensor | None:
        """The view for an attention module; None if it belongs to another builder."""
        ...


def storage_dtype(options: CacheOptions, context: LayerContext) -> torch.dtype:
    """The dtype in which keys, values and latents are stored."""
    if options.kv_cache_dtype == "auto":
        return context.dtype
    return torch.bfloat16 if options.kv_cache_dtype == "bf16" else context.ops.platform.fp8_dtype


def num_spare_blocks(device: torch.device) -> int:
    """Blocks at the end of a pool that no sequence owns.

    Slot -1 means no write. On a GPU such rows are written to the last slot of a spare block
    instead, since skipping them would need a host sync.
    """
    return 0 if device.type == "cpu" else 1


class KVCacheMemoryError(RuntimeError):
    """Too little memory for the KV cache; the message has the numbers."""


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
    """The number of blocks for a memory budget.

    Args:
        budget_bytes: memory for the pool.
        block_bytes: bytes of a block, one entry per builder.
        block_size: tokens per block.
        max_tokens: most tokens in the cache at once; a larger pool would be unused.
        num_spare: spare blocks that must fit in the budget as well.

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
