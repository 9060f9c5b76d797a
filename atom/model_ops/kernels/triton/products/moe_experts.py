"""Mixture of experts as two grouped GEMMs and a sum.

Whatever the tile, an output is one float32 accumulator over blocks of `_BLOCK_K` inputs in order,
and all tiles use the same matrix instruction (see `Tiles`): with one split, results are
batch-invariant. For few pairs `choose_splits` divides the inputs, whose sums are added in order.
A token's expert outputs are summed in the order of its ids. Nothing is added by atomics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import triton
import triton.language as tl

from atom.model_ops.gates import SILU, SiluGate, SituGate, refuses_gates
from atom.model_ops.kernels.triton.products.moe_align import ExpertBlocks, moe_align
from atom.model_ops.kernels.triton.products.moe_align import refuses as refuses_number
from atom.model_ops.kernels.triton.products.moe_splits import (
    choose_splits,
    parts_of,
    split_blocks,
)
from atom.model_ops.kernels.triton.products.moe_tiles import add_rows, store_outputs, weight_rows
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

_BLOCK_K = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
# Limit for the expert outputs before they are summed. Beyond it, slices of the hidden dimension are
# computed in turn, which reads no weight twice.
_VISITS_BYTES = 256 << 20
_SLICE = 256
_SUM_BLOCK = 512
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class Tiles:
    """Launch parameters of a grouped GEMM.

    Attributes:
        block_m: pairs per program.
        block_n: weight rows per program.
        weights_first: multiply weights by pairs, not pairs by weights. NVIDIA's warp group
            instruction has at least 64 rows; with weights as its rows, few pairs use the same
            instruction as many, which keeps results equal.
        options: for the compiler. AMD's two matrix instructions sum in different orders; all tiles
            use the small one, which suits few pairs.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    weights_first: bool = False
    options: dict[str, int] = field(default_factory=dict)

    def programs(self, blocks: ExpertBlocks, rows: int) -> int:
        """Programs of a product of `blocks` with so many rows of weights."""
        return blocks.limit * int(triton.cdiv(rows, self.block_n))


def refuses(query: OpQuery) -> str | None:
    """Why these experts are not supported; None if they are."""
    return refuses_gates(query.shape, SituGate) or refuses_number(query)


def choose_block_m(num_pairs: int, num_experts: int) -> int:
    """A power of two near the mean number of pairs per expert, from shapes alone."""
    if num_pairs <= 8 * num_experts:
        return 16
    return 64 if num_pairs <= 64 * num_experts else 128


def choose_tiles(kind: str, block_m: int, num_pairs: int, rows: int, wide: bool) -> Tiles:
    """Tiles for a platform `kind` and a number of weight rows; `wide` means float32."""
    few = block_m == 16
    if kind == "cuda":
        if few:
            return Tiles(16, 64, 4, 5, weights_first=True)
        return Tiles(block_m, 64 if wide else 128, 8, 3, weights_first=True)
    options = {"matrix_instr_nonkdim": 16}
    if few:
        # First enough programs for all compute units, then larger tiles.
        block_n = 32 if num_pairs * triton.cdiv(rows, 64) < 304 else 64
        return Tiles(16, block_n, 2 if block_n == 32 else 4, 4, options=options)
    return Tiles(block_m, 128, 8 if block_m == 128 else 4, 2, options=options)


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: SiluGate | SituGate = SILU,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](x[t])`, x [T, hidden] -> [T, hidden].

    w13: [experts, 2 * inter, hidden], gate above up. w2: [experts, hidden, inter]. ids [T, k] are
    valid expert ids, or `experts` for one of the `elsewhere` that other ranks hold; weights [T, k]
    float32.

    Accumulates in float32 and rounds to x's type where memory is written: after silu(gate) * up,
    after each expert, and at the end. No host sync.

    Raises:
        ValueError: when weights' rows are not contiguous.
    """
    return mixture(current_platform().kind, x, w13, w2, weights, ids, elsewhere, gate)


def moe_experts_into(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int,
    gate: SiluGate | SituGate,
    out: torch.Tensor,
) -> None:
    """`moe_experts`, written to `out` [T, hidden]."""
    mixture(current_platform().kind, x, w13, w2, weights, ids, elsewhere, gate, out=out)


def mixture(
    kind: str,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: SiluGate | SituGate = SILU,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe_experts` with the tiles of a platform `kind`; `splits` is None to fill the device, and
    `out` for new memory.
    """
    if w13.stride(2) != 1 or w2.stride(2) != 1:
        raise ValueError(
            "the weights of experts need contiguous rows; got strides "
            f"{w13.stride()} and {w2.stride()}"
        )
    wide, top_k, num_pairs = x.dtype == torch.float32, ids.shape[1], ids.numel()

    def up(blocks: ExpertBlocks) -> torch.Tensor:
        activated = x.new_empty(num_pairs, w2.shape[2])
        tiles = choose_tiles(kind, blocks.block_m, num_pairs, w13.shape[1], wide)
        parts = splits
        if parts is None:
            parts = choose_splits(kind, tiles.programs(blocks, w13.shape[1]), w13.shape[2])
        grouped_product(
            x, w13, activated, blocks, tiles, top_k, gated=True, splits=parts, gate=gate
        )
        return activated

    def down(activated: torch.Tensor, start: int, out: torch.Tensor, blocks: ExpertBlocks) -> None:
        rows = w2[:, start : start + out.shape[1]]
        tiles = choose_tiles(kind, blocks.block_m, num_pairs, out.shape[1], wide)
        grouped_product(activated, rows, out, blocks, tiles, 1, gated=False)

    return mix(x, w13.shape[0], up, down, weights, ids, elsewhere, out=out)


def mix(
    x: torch.Tensor,
    num_experts: int,
    up: Callable[[ExpertBlocks], Inputs],
    down: Callable[[Inputs, int, torch.Tensor, ExpertBlocks], None],
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    largest_block: int = 128,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the experts' outputs, from their two products.

    Args:
        up: from the blocks of pairs, silu(gate) * up of every pair, as `down` takes it.
        down: from these, writes features `start` on of each pair's output to [pairs, n].
        largest_block: pairs of a block at most.
        out: where the sum is written; None for new memory.
    """
    num_tokens, hidden = x.shape
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out
    num_pairs = ids.numel()
    block_m = min(choose_block_m(num_pairs, num_experts + elsewhere), largest_block)
    ids = ids.contiguous()
    blocks = moe_align(ids, num_experts, block_m)
    bound = num_experts if elsewhere else None
    inputs = up(blocks)
    width = _slice_width(num_pairs, hidden, x.element_size())
    visits = x.new_empty(num_pairs, width)
    for start in range(0, hidden, width):
        part = visits[:, : min(width, hidden - start)]
        down(inputs, start, part, blocks)
        _sum_visits(part, weights, ids, bound, out[:, start : start + width])
    return out


def _slice_width(num_pairs: int, hidden: int, itemsize: int) -> int:
    """The number of hidden features whose expert outputs fit in the workspace."""
    fitting = _VISITS_BYTES // (num_pairs * itemsize)
    return min(hidden, max(fitting // _SLICE, 1) * _SLICE)


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    blocks: ExpertBlocks,
    tiles: Tiles,
    visits_per_row: int,
    gated: bool,
    splits: int = 1,
    gate: SiluGate | SituGate = SILU,
) -> None:
    """out[p] = x[p // visits_per_row] @ weight[expert of p].T for every pair p.

    weight: [experts, rows, inputs]. With `gated` its rows are gate above up, and `out`
    [pairs, rows / 2] becomes silu(gate) * up, else `out` is [pairs, rows]. Only gated products are
    split.
    """
    rows, inputs = weight.shape[1:]
    block_k = _BLOCK_K[x.dtype]
    _grouped_product[(tiles.programs(blocks, rows), splits)](
        x,
        weight,
        out,
        *parts_of(out, rows, splits),
        blocks.pairs,
        blocks.experts,
        blocks.count,
        out.shape[0],
        rows,
        inputs,
        *x.stride(),
        *weight.stride()[:2],
        out.stride(0),
        VISITS_PER_ROW=visits_per_row,
        GATED=gated,
        BETA=gate.numbers[0],
        LINEAR_BETA=gate.numbers[1],
        SPLIT=splits > 1,
        WEIGHTS_FIRST=tiles.weights_first,
        WHOLE_K=inputs % block_k == 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **tiles.options,
    )


def _sum_visits(
    visits: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    bound: int | None,
    out: torch.Tensor,
) -> None:
    """visits [T * k, n], weights [T, k] -> out [T, n], summed in the order of k.

    Args:
        bound: only visits with smaller ids [T, k] were written; None if all were.
    """
    num_tokens, features = out.shape
    _weighted_sum[(num_tokens, triton.cdiv(features, _SUM_BLOCK))](
        visits,
        weights,
        ids,
        out,
        bound,
        features,
        visits.stride(0),
        *weights.stride(),
        out.stride(0),
        TOP_K=weights.shape[1],
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["count_ptr"])
def _grouped_product(
    x_ptr,
    weight_ptr,
    out_ptr,
    sums_ptr,
    arrived_ptr,
    pairs_ptr,
    experts_ptr,
    count_ptr,
    num_pairs,
    rows,
    inputs,
    stride_x,
    stride_input,
    stride_expert,
    stride_row,
    stride_out,
    VISITS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    SPLIT: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of pairs times one tile of its expert's rows, or a split of it.

    Elements beyond the last row or pair are computed from a valid address and not stored.
    """
    tiles = tl.cdiv(rows, BLOCK_N)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if block >= tl.load(count_ptr):
        return
    pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    tokens = (tl.minimum(pairs, num_pairs - 1) // VISITS_PER_ROW).to(tl.int64)
    places = weight_rows(tile, rows, GATED, BLOCK_N)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    x_ptrs = x_ptr + tokens * stride_x
    weight_ptrs = weight_ptr + expert * stride_expert + places * stride_row
    if WEIGHTS_FIRST:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = 0
    last = inputs
    if SPLIT:
        first_block, last_block = split_blocks(inputs, BLOCK_K)
        first = first_block * BLOCK_K
        last = tl.minimum(last_block * BLOCK_K, inputs)
    acc = add_rows(
        acc, x_ptrs, weight_ptrs, first, last, inputs, stride_input, WEIGHTS_FIRST, WHOLE_K, BLOCK_K
    )
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    store_outputs(
        acc,
        out_ptr,
        sums_ptr,
        arrived_ptr,
        pairs,
        num_pairs,
        tile,
        rows,
        stride_out,
        GATED,
        BETA,
        LINEAR_BETA,
    )


@triton.jit
def _weighted_sum(
    visits_ptr,
    weights_ptr,
    ids_ptr,
    out_ptr,
    bound,
    features,
    stride_visit,
    stride_token,
    stride_k,
    stride_out,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of features of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * stride_token + k * stride_k)
        row_ptr = visits_ptr + (token * TOP_K + k) * stride_visit
        written = inside
        if bound is not None:
            written = inside & (tl.load(ids_ptr + token * TOP_K + k) < bound)
        total += weight * tl.load(row_ptr + columns, mask=written, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * stride_out + columns,
        total.to(out_ptr.dtype.element_ty),
        mask=inside,
    )
