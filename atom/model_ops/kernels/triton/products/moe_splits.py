"""Splits of the inputs of an expert's first product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.splits import BUSY, arrivals, fewest_that_fill

_MOST_SPLITS = 8
# A split has at least so many inputs.
_LEAST_INPUTS = 1024


def choose_splits(kind: str, programs: int, inputs: int) -> int:
    """Parts that inputs are summed in, by the `programs` of a product that do not split them."""
    slots = BUSY.get(kind, 1)
    if programs >= slots:
        return 1
    return fewest_that_fill(programs, min(inputs // _LEAST_INPUTS, _MOST_SPLITS), slots)


def parts_of(out: torch.Tensor, rows: int, splits: int) -> tuple[torch.Tensor | None, ...]:
    """Where programs of a gated product of `out` leave the sums of their splits, [splits, pairs,
    rows] float32, and `arrivals`; None where inputs are not split.
    """
    if splits == 1:
        return None, None
    sums = out.new_empty(splits, out.shape[0], rows, dtype=torch.float32)
    return sums, arrivals(out.device)


@triton.jit
def split_blocks(inputs, BLOCK_K: tl.constexpr):
    """First and last (exclusive) block of inputs of this program's split."""
    blocks = tl.cdiv(inputs, BLOCK_K)
    share = tl.cdiv(blocks, tl.num_programs(1))
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, blocks)


@triton.jit
def gate_times_up(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """silu(gate) * up, or with a beta the gate of the op `situ_and_mul`."""
    if BETA == 0:
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        result = bounded(gate, BETA) / (1.0 + tl.exp(-gate)) * bounded(up, LINEAR_BETA)
    return result


@triton.jit
def bounded(x, BETA: tl.constexpr):
    """BETA * tanh(x / BETA): near 0, where it is nearly x, by the series of tanh."""
    y = x / BETA
    square = y * y
    series = square * (square * (square * (62.0 / 2835) - 17.0 / 315) + 2.0 / 15) - 1.0 / 3
    power = tl.exp(-2.0 * tl.abs(y))
    far = BETA * (1.0 - power) / (1.0 + power)
    far = tl.where(y < 0, -far, far)
    return tl.where(square < 1.0 / 16, x + x * square * series, far)
