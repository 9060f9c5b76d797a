"""Parts of the grouped products of experts, quantised or not: what one tile reads and writes."""

from __future__ import annotations

import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.moe_splits import gate_times_up
from atom.model_ops.kernels.triton.splits import add_splits, arrives_last


@triton.jit
def add_rows(
    acc,
    x_ptrs,
    weight_ptrs,
    first,
    last,
    inputs,
    stride_input,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr = None,
):
    """acc + x @ weights.T over inputs `first` to `last`.

    x_ptrs, weight_ptrs: [BLOCK_M] and [BLOCK_N], the first input of each row.
    STAGES: of the loop; None for those of the kernel.
    """
    lanes = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptrs[:, None] + (first + lanes)[None, :] * stride_input
    weight_ptrs = weight_ptrs[:, None] + (first + lanes)[None, :]
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if WHOLE_K:
            x = tl.load(x_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            inside = (lanes < inputs - k)[None, :]
            x = tl.load(x_ptrs, mask=inside, other=0.0)
            weight = tl.load(weight_ptrs, mask=inside, other=0.0)
        if WEIGHTS_FIRST:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        x_ptrs += BLOCK_K * stride_input
        weight_ptrs += BLOCK_K
    return acc


@triton.jit
def weight_rows(tile, rows, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows [BLOCK_N] of a tile; valid ones if it goes beyond the last."""
    places = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), rows - 1)
    if GATED:
        # Interleave the gate and up rows of each output.
        places = places // 2 + (places % 2) * (rows // 2)
    return places


@triton.jit
def store_outputs(
    acc,
    out_ptr,
    sums_ptr,
    arrived_ptr,
    pairs,
    num_pairs,
    tile,
    rows,
    stride_out,
    GATED: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    """Write sums [BLOCK_M, BLOCK_N] of the tile's `weight_rows` to the rows of `pairs`. If they are
    those of a split, the last program of a tile adds up and writes.

    sums_ptr, arrived_ptr: `parts_of`.
    BETA, LINEAR_BETA: as `gate_times_up` has them.
    """
    if sums_ptr is None:
        _store(acc, out_ptr, pairs, num_pairs, tile, rows, stride_out, GATED, BETA, LINEAR_BETA)
    else:
        BLOCK_N: tl.constexpr = acc.shape[1]
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        part_ptrs = sums_ptr + pairs.to(tl.int64)[:, None] * rows + columns[None, :]
        mask = (pairs < num_pairs)[:, None] & (columns < rows)[None, :]
        stride = num_pairs.to(tl.int64) * rows
        tl.store(part_ptrs + tl.program_id(1) * stride, acc, mask=mask)
        if arrives_last(arrived_ptr + tl.program_id(0)):
            total = add_splits(part_ptrs, mask, stride)
            _store(
                total, out_ptr, pairs, num_pairs, tile, rows, stride_out, GATED, BETA, LINEAR_BETA
            )


@triton.jit
def _store(
    acc,
    out_ptr,
    pairs,
    num_pairs,
    tile,
    rows,
    stride_out,
    GATED: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        result = gate_times_up(gate, up, BETA, LINEAR_BETA)
        columns = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside = columns < rows // 2
    else:
        result = acc
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < rows
    out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * stride_out + columns[None, :]
    mask = (pairs < num_pairs)[:, None] & inside[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
