"""Prefill attention over a paged cache that already has the new keys; any query lengths.

One program computes a tile of rows (queries times the query heads of one KV head) of one sequence.
Sequence b's tiles start at tile `cu_seqlens_q[b] * group // BLOCK_M + b`: no tile belongs to two
sequences, at most one per sequence is empty, and the grid needs no host sync.

Few tiles of a long context, such as the last chunk of a long prompt, leave most of a device idle:
then each tile's keys are split, and parts are joined as in decode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.triton.attention.flash import (
    PREFILL_TILE_BYTES,
    SMALLEST_TILE,
    KeyTiles,
    cache_arguments,
    key_tiles,
    mean_value,
    no_key_seen,
    query_rows,
    special_arguments,
    tile_arguments,
    visit_keys,
)
from atom.model_ops.kernels.triton.attention.paged_attention import launch_in_parts, visible_keys
from atom.model_ops.kernels.triton.splits import compute_units, fewest_that_fill, side_by_side
from atom.platform import Platform, current_platform

# Keys of a split: with fewer, joining costs more than it saves.
_SHORTEST_SPLIT = 1024
_MOST_SPLITS = 32


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
    out_ptr, lse_ptr, q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    tables_ptr, lens_ptr, starts_ptr, sinks_ptr, num_sequences,
    score_scale, softcap, window, table_stride,
    q_token_stride, q_head_stride, block_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, KV heads, splits. Outputs are those of the decode kernel."""
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
    state = no_key_seen(sinks_ptr, heads, real, BLOCK_M, D)
    oldest = first_position * 0
    if WINDOWED:
        oldest = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(end - oldest, tl.num_programs(2) * BLOCK_N) * BLOCK_N
    begin = oldest + tl.program_id(2) * share
    end = tl.minimum(begin + share, end)
    if not WINDOWED:
        # Keys visible to the first row are visible to all.
        all_see = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
        middle = tl.maximum(tl.minimum(all_see, end), begin)
        state = visit_keys(
            state, q, positions, begin, middle, pool, score_scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, False,
        )  # fmt: skip
        begin = middle
    acc, total, top = visit_keys(
        state, q, positions, begin, end, pool, score_scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOWED, True,
    )  # fmt: skip
    result = mean_value(acc, total, value_scale_ptr).to(out_ptr.dtype.element_ty)
    places = tokens * NUM_HEADS + heads
    if lse_ptr is not None:
        places = places * tl.num_programs(2) + tl.program_id(2)
        lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(lse_ptr + places, lse, mask=real)
    tl.store(out_ptr + places[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)


def prefill_attention(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over the paged cache -> [T, heads, d].

    The last query of a sequence sits at the last position of its context; the result of a query
    without visible keys is zero.

    Raises:
        ValueError: when the tensors do not fit together.
    """
    return attend(compute_units(), q, kv_cache, metadata, scale, sliding_window, softcap, sinks)


def attend(
    units: int,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`prefill_attention`, split to fill `units` compute units."""
    key = kv_cache.key
    # FP8 keys are converted in registers, which more of them do not leave.
    tile_bytes = PREFILL_TILE_BYTES // 2 if key.dtype.itemsize == 1 else PREFILL_TILE_BYTES
    tiles = key_tiles(q, kv_cache, tile_bytes)
    row_tile, num_warps = _row_tile(tiles)
    num_rows = q.shape[0] * (q.shape[1] // key.shape[2])
    sequences, kv_heads = metadata.block_tables.shape[0], key.shape[2]
    arguments = {
        "num_sequences": sequences,
        **cache_arguments(q, kv_cache, metadata, scale, sliding_window),
        **special_arguments(scale, softcap, sinks),
        **tile_arguments(q, key, tiles),
        "BLOCK_M": row_tile,
        "num_warps": num_warps,
        "num_stages": 2,
    }
    programs = num_rows // row_tile + sequences, kv_heads
    reach = visible_keys(metadata, sliding_window)
    slots = side_by_side(units, _resident(current_platform(), num_warps))
    splits = num_splits(programs[0] * programs[1], reach, slots)
    return launch_in_parts(_attend, arguments, (*programs, splits), q)


def num_splits(programs: int, context_len: int, slots: int) -> int:
    """Parts of the keys of each tile, from shapes and the device alone.

    Tiles that fill the device are not split: partial results of many tokens are large.

    Args:
        slots: programs that the device runs side by side.
    """
    if programs >= slots:
        return 1
    return fewest_that_fill(programs, min(context_len // _SHORTEST_SPLIT, _MOST_SPLITS), slots)


def _resident(platform: Platform, num_warps: int) -> int:
    """Programs that a unit runs side by side; shared memory is the limit on gfx942."""
    return 2 if num_warps == 4 and platform.arch != "gfx942" else 1


def _row_tile(tiles: KeyTiles) -> tuple[int, int]:
    """Rows of a tile, and the number of warps whose registers hold its sums."""
    if tiles.compute == tl.float32:
        return SMALLEST_TILE, 4
    return (128, 8) if tiles.width <= 128 else (64, 8)
