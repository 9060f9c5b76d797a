"""Sorts (token, expert) pairs by expert on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom.model_ops.registry import OpQuery

_MAX_EXPERTS = 1024
_CHUNKS = (64, 256, 1024, 4096)
# The smallest blocks are for up to so many pairs for each expert.
_FEW, _FEW_PAIRS = 16, 8


def refuses(query: OpQuery) -> str | None:
    """Why this number of experts is not supported; None if it is."""
    if query.shape["num_experts"] > _MAX_EXPERTS:
        return f"{query.shape['num_experts']} experts, at most {_MAX_EXPERTS}"
    return None


@dataclass(frozen=True)
class ExpertBlocks:
    """Blocks of `block_m` pairs of the same expert. Pair p is choice p % k of token p // k.

    Attributes:
        pairs: [limit * block_m] int32, ascending in each block; an expert's last block is padded
            with T * k.
        experts: [limit] int32, the expert of each block, ascending.
        count: [1] int32, the number of blocks; entries beyond are undefined.
    """

    block_m: int
    pairs: torch.Tensor
    experts: torch.Tensor
    count: torch.Tensor

    @property
    def limit(self) -> int:
        """Maximum number of blocks, from shapes alone."""
        return self.experts.shape[0]


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The number of blocks in the worst case."""
    visited = min(num_pairs, num_experts)
    return visited + (num_pairs - visited) // block_m


def choose_chunk(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Pairs that are read at a time.

    Every chunk with a `block_m` serves numbers of tokens of which the largest is nearly four times
    the smallest, or more, so that a warm-up with a few numbers of tokens compiles all.
    """
    if block_m > _FEW:
        return _CHUNKS[-1]
    fitting = [chunk for chunk in _CHUNKS if chunk <= _FEW_PAIRS * num_experts] or [_CHUNKS[0]]
    return next((chunk for chunk in fitting if chunk >= num_pairs), fitting[-1])


def moe_align(ids: torch.Tensor, num_experts: int, block_m: int) -> ExpertBlocks:
    """Sort the pairs of expert ids [T, k] (contiguous) into blocks; those whose id is `num_experts`
    are left out.

    One launch with one program per expert and no host sync, so a graph can capture it. Pairs are
    ordered by expert, then by pair.
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
        num_experts,
        BINS=max(64, triton.next_power_of_2(num_experts)),
        BLOCK_M=block_m,
        CHUNK=choose_chunk(num_pairs, num_experts, block_m),
        num_warps=4,
    )
    return ExpertBlocks(block_m, pairs, experts, count)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["count_ptr"])
def _align(
    ids_ptr,
    pairs_ptr,
    experts_ptr,
    count_ptr,
    num_pairs,
    num_experts,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The blocks of one expert. Every program counts all pairs to find where its blocks start."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    visits = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        inside = start + lanes < num_pairs
        ids = tl.load(ids_ptr + start + lanes, mask=inside, other=0).to(tl.int32)
        visits += tl.histogram(ids, BINS, mask=inside & (ids < num_experts))

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
