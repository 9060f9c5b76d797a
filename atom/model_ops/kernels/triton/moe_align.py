"""Which expert multiplies which rows: the pairs of token and expert, sorted on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom.model_ops.registry import OpQuery

_MAX_EXPERTS = 512
_CHUNKS = (64, 256, 1024, 4096)


def refuses(query: OpQuery) -> str | None:
    """Why a mixture of so many experts cannot be computed; None when it can."""
    if query.shape["num_experts"] > _MAX_EXPERTS:
        return f"{query.shape['num_experts']} experts, at most {_MAX_EXPERTS}"
    return None


@dataclass(frozen=True)
class ExpertBlocks:
    """Blocks of `block_m` pairs that visit the same expert; pair p is token p // k's visit p % k.

    Attributes:
        pairs: [limit * block_m] int32, each block's pairs in rising order; T * k pads the last
            block of an expert.
        experts: [limit] int32, the expert of each block, rising.
        count: [1] int32, how many blocks there are; what lies beyond is undefined.
    """

    block_m: int
    pairs: torch.Tensor
    experts: torch.Tensor
    count: torch.Tensor

    @property
    def limit(self) -> int:
        """The most blocks there can be, from shapes alone."""
        return self.experts.shape[0]


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """As many blocks as the worst choice of experts makes of this many pairs."""
    visited = min(num_pairs, num_experts)
    return visited + (num_pairs - visited) // block_m


def moe_align(ids: torch.Tensor, num_experts: int, block_m: int) -> ExpertBlocks:
    """Sort the pairs of expert ids [T, k] (contiguous, all in [0, num_experts)) into blocks.

    One launch, one program an expert; the host learns nothing of the ids, so that a graph can
    capture it. The order is always the same: by expert, then by pair.
    """
    num_pairs = ids.numel()
    limit = max_blocks(num_pairs, num_experts, block_m)
    buffer = torch.empty(limit * (block_m + 1) + 1, dtype=torch.int32, device=ids.device)
    pairs, experts, count = buffer.split_with_sizes([limit * block_m, limit, 1])
    _align[(num_experts,)](
        ids,
        pairs,
        experts,
        count,
        num_pairs,
        BINS=max(64, triton.next_power_of_2(num_experts)),
        BLOCK_M=block_m,
        CHUNK=next((chunk for chunk in _CHUNKS if chunk >= num_pairs), _CHUNKS[-1]),
        num_warps=4,
    )
    return ExpertBlocks(block_m, pairs, experts, count)


@triton.jit(do_not_specialize=["num_pairs"])
def _align(
    ids_ptr,
    pairs_ptr,
    experts_ptr,
    count_ptr,
    num_pairs,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The blocks of one expert. Every program counts all visits, to know where its blocks start."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    visits = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        inside = start + lanes < num_pairs
        ids = tl.load(ids_ptr + start + lanes, mask=inside, other=0).to(tl.int32)
        visits += tl.histogram(ids, BINS, mask=inside)

    bins = tl.arange(0, BINS)
    blocks = (visits + (BLOCK_M - 1)) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    mine = tl.sum(tl.where(bins == expert, visits, 0), 0)
    taken = (mine + (BLOCK_M - 1)) // BLOCK_M
    if expert == 0:
        tl.store(count_ptr, tl.sum(blocks, 0))
    if mine == 0:
        return

    rows_ptr = pairs_ptr + first * BLOCK_M
    before = 0
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lanes, mask=start + lanes < num_pairs, other=-1)
        visiting = (ids == expert).to(tl.int32)
        places = before + tl.cumsum(visiting, 0) - 1
        tl.store(rows_ptr + places, start + lanes, mask=visiting != 0)
        before += tl.sum(visiting, 0)
    padding = mine + tl.arange(0, BLOCK_M)
    tl.store(rows_ptr + padding, num_pairs, mask=padding < taken * BLOCK_M)
    for block in range(taken):
        tl.store(experts_ptr + first + block, expert)
