"""Splits of the inputs of an expert's first product, and their sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.splits import BUSY, fewest_that_fill

_SUM_BLOCK = 512
_MOST_SPLITS = 8
# A split has at least so many inputs.
_LEAST_INPUTS = 1024


def choose_splits(kind: str, programs: int, inputs: int) -> int:
    """Parts that inputs are summed in, by the `programs` of a product that do not split them."""
    slots = BUSY.get(kind, 1)
    if programs >= slots:
        return 1
    return fewest_that_fill(programs, min(inputs // _LEAST_INPUTS, _MOST_SPLITS), slots)


def split_sums(out: torch.Tensor, rows: int, splits: int) -> torch.Tensor:
    """Where a gated product of `out` goes: [splits, pairs, rows] float32, or `out` itself."""
    if splits == 1:
        return out
    return out.new_empty(splits, out.shape[0], rows, dtype=torch.float32)


def join_gated(sums: torch.Tensor, out: torch.Tensor) -> None:
    """silu(gate) * up [pairs, n] of sums [splits, pairs, 2 * n], a gate beside its up."""
    splits, num_pairs, rows = sums.shape
    _join_gated[(num_pairs, triton.cdiv(rows // 2, _SUM_BLOCK))](
        sums, out, num_pairs, rows, splits, out.stride(0), BLOCK=_SUM_BLOCK, num_warps=4
    )


@triton.jit
def split_blocks(inputs, BLOCK_K: tl.constexpr):
    """First and last (exclusive) block of inputs of this program's split."""
    blocks = tl.cdiv(inputs, BLOCK_K)
    share = tl.cdiv(blocks, tl.num_programs(1))
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, blocks)


@triton.jit
def gate_times_up(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_pairs", "splits"])
def _join_gated(sums_ptr, out_ptr, num_pairs, rows, splits, stride_out, BLOCK: tl.constexpr):
    """A block of outputs of one pair."""
    pair = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    total = tl.zeros([2 * BLOCK], tl.float32)
    for split in range(splits):
        part_ptr = sums_ptr + (split * num_pairs + pair) * rows
        total += tl.load(part_ptr + places, mask=places < rows, other=0.0)
    gate, up = tl.split(tl.reshape(total, [BLOCK, 2]))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    result = gate_times_up(gate, up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair * stride_out + columns, result, mask=columns < rows // 2)
