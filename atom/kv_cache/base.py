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
    num_window_blocks: blocks of the pool of layers with a window, if they have one.
    """

    num_blocks: int
    block_bytes: int
    num_window_blocks: int = 0


@dataclass(frozen=True)
class WindowNeed:
    """What layers with a sliding window take of the memory.

    Attributes:
        block_bytes: of one of their blocks.
        per_sequence, in_steps: as `CacheWindow.most_blocks` has them.
        max_num_seqs: sequences that run at once.
    """

    block_bytes: int
    per_sequence: int
    in_steps: int
    max_num_seqs: int

    @property
    def least(self) -> int:
        """Blocks with which a sequence can run."""
        return self.per_sequence + self.in_steps

    @property
    def most(self) -> int:
        """Blocks that are ever held."""
        return self.max_num_seqs * self.per_sequence + self.in_steps


def plan_kv_cache(
    budget_bytes: int,
    block_bytes: Sequence[int],
    block_size: int,
    max_tokens: int,
    num_spare: int = 0,
    window: WindowNeed | None = None,
) -> KVCachePlan:
    """The number of blocks for a memory budget.

    Layers with a window get as many as the longest contexts take that fit in the memory, but not
    less than half of the blocks that one pool of all layers would have: in contexts that are not
    longer than the window, they need as many as all others.

    Args:
        budget_bytes: memory for the pool.
        block_bytes: bytes of a block, one entry per builder.
        block_size: tokens per block.
        max_tokens: most tokens in the cache at once; a larger pool would be unused.
        num_spare: spare blocks that must fit in the budget as well.
        window: of layers that have a pool of their own; `block_bytes` are of the others then.

    Raises:
        KVCacheMemoryError: when not even one block fits.
    """
    others = sum(block_bytes)
    per_block = others + (0 if window is None else window.block_bytes)
    num_blocks = min(budget_bytes // per_block - num_spare, -(-max_tokens // block_size))
    if num_blocks < 1:
        raise KVCacheMemoryError(
            f"a KV cache budget of {budget_bytes} bytes holds no block of {block_size} tokens "
            f"({per_block} bytes); raise --kv-cache-memory or --gpu-memory-utilization"
        )
    if window is None:
        return KVCachePlan(num_blocks, per_block)
    return _with_windows(
        budget_bytes - num_spare * per_block, others, -(-max_tokens // block_size), window
    )


def _with_windows(budget_bytes: int, others: int, most: int, window: WindowNeed) -> KVCachePlan:
    """Args:
    budget_bytes: without spare blocks.
    others: bytes of a block of layers without a window.
    most: blocks that are ever held of these.
    """
    own, per_block = window.block_bytes, others + window.block_bytes
    together = min(budget_bytes // per_block, most)
    in_context = -(-most // window.max_num_seqs)
    per_sequence = in_context * others + window.per_sequence * own
    sequences = max(budget_bytes - window.in_steps * own, 0) / per_sequence
    wanted = int(sequences * window.per_sequence) + window.in_steps
    wanted = min(max(wanted, -(-together // 2), window.least), window.most, together)
    if not others:
        wanted = min(budget_bytes // own, window.most)
        return KVCachePlan(min(most, wanted) if wanted < window.least else most, own, wanted)
    if wanted < window.least:  # contexts must be shorter
        return KVCachePlan(wanted, per_block, wanted)
    num_blocks = min((budget_bytes - wanted * own) // others, most)
    wanted = min((budget_bytes - num_blocks * others) // own, window.most)
    return KVCachePlan(num_blocks, per_block, wanted)
