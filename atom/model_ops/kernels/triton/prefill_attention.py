"""Prefill attention over a paged cache that already has the new keys; any query lengths.

One program computes a tile of rows (queries times the query heads of one KV head) of one sequence.
Sequence b's tiles start at tile `cu_seqlens_q[b] * group // BLOCK_M + b`: no tile belongs to two
sequences, at most one per sequence is empty, and the grid needs no host sync.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.flash import (
    SMALLEST_TILE,
    KeyTiles,
    cache_arguments,
    key_tiles,
    mean_value,
    nothing_seen,
    query_rows,
    tile_arguments,
    visit_keys,
)
from atom.model_ops.metadata import AttentionMetadata, KVCacheTensor


@triton.jit
def _first_tile(starts_ptr, sequence, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    return tl.load(starts_ptr + sequence) * GROUP // BLOCK_M + sequence


@triton.jit
def _owner(starts_ptr, num_sequences, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The last sequence whose tiles start at or before `tile`."""
    low = tile * 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = _first_tile(starts_ptr, middle, GROUP, BLOCK_M) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "starts_ptr"],
)
def _attend(
    out_ptr, q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    tables_ptr, lens_ptr, starts_ptr, num_sequences, score_scale, window, table_stride,
    q_token_stride, q_head_stride, block_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, KV heads. out [T, heads, d]."""
    sequence = _owner(starts_ptr, num_sequences, tl.program_id(0), GROUP, BLOCK_M)
    kv_head = tl.program_id(1)
    first_row = (tl.program_id(0) - _first_tile(starts_ptr, sequence, GROUP, BLOCK_M)) * BLOCK_M
    first_token = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - first_token
    num_rows = num_queries * GROUP
    if first_row >= num_rows:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    real = rows < num_rows
    tokens, heads = query_rows(first_token, kv_head, rows, GROUP)
    dims = tl.arange(0, D)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = tokens * q_token_stride + heads * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)

    start = tl.load(lens_ptr + sequence) - num_queries
    positions = start + rows // GROUP
    first_position = start + first_row // GROUP
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    end = start + last_row // GROUP + 1
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    head = kv_head * head_stride
    pool = table_ptr, key_ptr + head, value_ptr + head, block_stride, token_stride
    if key_scale_ptr is not None:
        score_scale = score_scale * tl.load(key_scale_ptr)
    state = nothing_seen(BLOCK_M, D)
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0)
    else:
        # Keys visible to the first row are visible to all.
        begin = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
        state = visit_keys(
            state, q, positions, 0, begin, pool, score_scale, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, False,
        )  # fmt: skip
    acc, total, _ = visit_keys(
        state, q, positions, begin, end, pool, score_scale, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOWED, True,
    )  # fmt: skip
    result = mean_value(acc, total, value_scale_ptr)
    places = (tokens * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=mask)


def prefill_attention(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over the paged cache -> [T, heads, d].

    The last query of a sequence sits at the last position of its context; the result of a query
    without visible keys is zero.

    Raises:
        ValueError: when the tensors do not fit together.
    """
    tiles, key = key_tiles(q, kv_cache), kv_cache.key
    row_tile, num_warps = _row_tile(tiles)
    num_rows = q.shape[0] * (q.shape[1] // key.shape[2])
    sequences = metadata.block_tables.shape[0]
    out = q.new_empty(q.shape)
    _attend[(num_rows // row_tile + sequences, key.shape[2])](
        out_ptr=out,
        num_sequences=sequences,
        **cache_arguments(q, kv_cache, metadata, scale, sliding_window),
        **tile_arguments(q, key, tiles),
        BLOCK_M=row_tile,
        num_warps=num_warps,
    )
    return out


def _row_tile(tiles: KeyTiles) -> tuple[int, int]:
    """Rows of a tile, and the number of warps whose registers hold its sums."""
    if tiles.compute == tl.float32:
        return SMALLEST_TILE, 4
    return (128, 8) if tiles.width <= 128 else (64, 8)
