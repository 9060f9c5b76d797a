"""The largest score of each row, of this rank or of all, and its token: a launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.sampling.scores import (
    INT_MAX,
    INT_MIN,
    ORDER_OF_INFINITY,
    ORDER_OF_NEGATIVE_INFINITY,
    load_scores,
    order_of,
)
from atom.model_ops.registry import OpQuery

# A program reads a whole row. Beyond that several are faster, whose results need a second launch.
LARGEST_VOCABULARY = 2**16
_TILE = 8192  # scores that a program reads at once


def refuses(query: OpQuery) -> str | None:
    """Why this vocabulary is not supported; None if it is."""
    size = query.shape["vocab_size"]
    too_large = size > LARGEST_VOCABULARY
    return f"vocab_size={size} is more than one program reads" if too_large else None


@triton.jit
def _largest_place(row_ptr, vocab_size, TILE: tl.constexpr):
    """int32, of the scores of a row: of equal ones the first, and NaN before all others."""
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), INT_MIN, tl.int32)
    place = tl.full((TILE,), INT_MAX, tl.int32)
    for start in range(0, vocab_size, TILE):
        column = start + lane
        order = order_of(load_scores(row_ptr, column, vocab_size))
        is_better = (order > best) & (column < vocab_size)
        best = tl.where(is_better, order, best)
        place = tl.where(is_better, column, place)
    return tl.min(tl.where(best == tl.max(best, axis=0), place, INT_MAX), axis=0)


@triton.jit
def _argmax(
    scores_ptr, ids_ptr, out_ptr, row_stride, vocab_size,
    IDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    winner = _largest_place(scores_ptr + row * row_stride, vocab_size, TILE).to(tl.int64)
    if IDS:
        winner = tl.load(ids_ptr + winner)
    tl.store(out_ptr + row, winner)


@triton.jit
def _pair(scores_ptr, out_ptr, row_stride, vocab_size, first, TILE: tl.constexpr):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * row_stride
    place = _largest_place(row_ptr, vocab_size, TILE)
    bits = tl.load(row_ptr + place).to(tl.int32, bitcast=True)
    tl.store(out_ptr + 2 * row, bits)
    tl.store(out_ptr + 2 * row + 1, place + first)


@triton.jit(do_not_specialize=["num_rows"])
def _of_pairs(
    pairs_ptr, ids_ptr, out_ptr, num_rows, num_ranks,
    IDS: tl.constexpr, FINITE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    at = 2 * (rank * num_rows + row)
    bits = tl.load(pairs_ptr + at, mask=rank < num_ranks, other=0)
    order = tl.where(rank < num_ranks, order_of(bits.to(tl.float32, bitcast=True)), INT_MIN)
    best = tl.max(order, axis=0)
    winner = tl.min(tl.where(order == best, rank, INT_MAX), axis=0)
    place = tl.load(pairs_ptr + 2 * (winner * num_rows + row) + 1).to(tl.int64)
    if IDS:
        place = tl.load(ids_ptr + place)
    if FINITE:
        is_finite = (best < ORDER_OF_INFINITY) & (best > ORDER_OF_NEGATIVE_INFINITY)
        place = tl.where(is_finite, place, -1)
    tl.store(out_ptr + row, place)


def argmax(scores: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """As in `kernels/torch/sampling.py`."""
    num_rows, vocab_size = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    out = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows:
        _argmax[(num_rows,)](
            scores,
            out if token_ids is None else token_ids,
            out,
            scores.stride(0),
            vocab_size,
            IDS=token_ids is not None,
            TILE=_tile(vocab_size),
            num_warps=8,
        )
    return out


def largest_pair(scores: torch.Tensor, start: int) -> torch.Tensor:
    """As in `kernels/torch/sampling.py`.

    Raises:
        ValueError: for scores that are not float32.
    """
    num_rows, vocab_size = scores.shape
    if scores.dtype is not torch.float32:
        raise ValueError(f"largest_pair wants scores in float32, not {scores.dtype}")
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    pairs = torch.empty(num_rows, 2, dtype=torch.int32, device=scores.device)
    if num_rows:
        sizes = scores.stride(0), vocab_size, start
        _pair[(num_rows,)](scores, pairs, *sizes, TILE=_tile(vocab_size), num_warps=8)
    return pairs


def largest_of_pairs(
    pairs: torch.Tensor, token_ids: torch.Tensor | None, needs_finite: bool
) -> torch.Tensor:
    """As in `kernels/torch/sampling.py`."""
    pairs = pairs.contiguous()
    num_ranks, num_rows, _ = pairs.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=pairs.device)
    if num_rows:
        _of_pairs[(num_rows,)](
            pairs,
            out if token_ids is None else token_ids,
            out,
            num_rows,
            num_ranks,
            IDS=token_ids is not None,
            FINITE=needs_finite,
            RANKS=triton.next_power_of_2(num_ranks),
            num_warps=1,
        )
    return out


def _tile(vocab_size: int) -> int:
    size: int = triton.next_power_of_2(vocab_size)
    return min(_TILE, size)
