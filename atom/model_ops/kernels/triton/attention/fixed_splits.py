"""Attention over splits of a fixed number of keys, for `--batch-invariant`.

Split s has the keys at positions s * SPLIT_KEYS to (s + 1) * SPLIT_KEYS of its sequence, whatever
the batch, the number of queries and the length of the context. All queries, of a prompt as of a
decoding sequence, are computed by the same kernels in the same tiles: one for each split apart, and
`_join`, which adds the splits of a query one after the other. What a query does not see, a tile or
a split, adds exactly nothing.

Results of splits take memory, so they come in rounds, between which a query's sums are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.attention.flash import to_log2

# Enough that writing a split's result costs little beside reading its keys.
SPLIT_KEYS = 512
_ROUND_BYTES = 256 << 20
_JOINED_ROWS = 8


def in_rounds(
    visit: Callable[[int, int, torch.Tensor, torch.Tensor], None],
    splits: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out` [T, heads, d], dense: the attention whose splits 0 to `splits` are computed by `visit`.

    Args:
        visit: from the keys of a split and the number of the first, writes means [T, heads, n, d]
            of n splits and log2 of their weights [T, heads, n], both float32. What it does not
            write counts nothing.
        sinks: [heads] float32, a score more in each head's softmax, whose value is 0.
    """
    tokens, heads, width = out.shape
    if not out.numel():
        return out
    count = min(splits, max(_ROUND_BYTES // (4 * out.numel()), 1))
    parts = out.new_empty(tokens, heads, count, width, dtype=torch.float32)
    state = parts
    if count < splits:
        state = out.new_empty(tokens, heads, width + 2, dtype=torch.float32)
    for first in range(0, splits, count):
        lse = parts.new_full((tokens, heads, count), float("-inf"))
        visit(SPLIT_KEYS, first, parts, lse)
        _join[(triton.cdiv(tokens * heads, _JOINED_ROWS),)](
            parts,
            lse,
            state,
            out,
            sinks,
            tokens * heads,
            count,
            int(first > 0),
            int(first + count >= splits),
            HEADS=heads,
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            ROWS=_JOINED_ROWS,
            num_warps=4,
        )
    return out


def num_splits(context_len: int) -> int:
    """Splits of a context of at most this length."""
    return max(-(-context_len // SPLIT_KEYS), 1)


def num_seen_splits(context_len: int, window: int | None, queries: int) -> int:
    """Splits that `queries` queries at the end of a context see at most, through a window."""
    if window is None:
        return num_splits(context_len)
    return num_splits(min(context_len, window + queries - 1 + SPLIT_KEYS))


@triton.jit(do_not_specialize=["num_rows", "count", "is_later", "is_last"])
def _join(
    parts_ptr, lse_ptr, state_ptr, out_ptr, sinks_ptr, num_rows, count, is_later, is_last,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add `count` splits of each row to its sums, and divide them after the last.

    Grid: tiles of rows. The sums are weighted values, the total weight and the largest lse.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    real = row < num_rows
    mask = real[:, None] & (columns < WIDTH)[None, :]
    state_ptrs = state_ptr + row * (WIDTH + 2)
    later = real & (is_later != 0)
    acc = tl.load(state_ptrs[:, None] + columns[None, :], mask=mask & later[:, None], other=0.0)
    total = tl.load(state_ptrs + WIDTH, mask=later, other=0.0)
    top = tl.load(state_ptrs + WIDTH + 1, mask=later, other=float("-inf"))
    for split in range(count):
        at = row * count + split
        lse = tl.load(lse_ptr + at, mask=real, other=float("-inf"))
        # Parts without keys are undefined.
        written = mask & (lse > float("-inf"))[:, None]
        values = tl.load(
            parts_ptr + at[:, None] * WIDTH + columns[None, :], mask=written, other=0.0
        )
        new_top = tl.maximum(top, lse)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - shift)
        decay = tl.exp2(top - shift)
        total = total * decay + weight
        acc = acc * decay[:, None] + values * weight[:, None]
        top = new_top
    if is_last:
        if sinks_ptr is not None:
            sink = to_log2(tl.load(sinks_ptr + row % HEADS, mask=real, other=0.0))
            new_top = tl.maximum(top, sink)
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.exp2(sink - new_top)
            acc = acc * decay[:, None]
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = out_ptr + row[:, None] * WIDTH + columns[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(state_ptrs[:, None] + columns[None, :], acc, mask=mask)
        tl.store(state_ptrs + WIDTH, total, mask=real)
        tl.store(state_ptrs + WIDTH + 1, top, mask=real)
