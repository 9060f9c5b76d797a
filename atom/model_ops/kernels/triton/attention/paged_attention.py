"""Decode and verify attention: few queries per sequence over a paged cache, with split contexts.

One program computes the query heads of one KV head, for all queries of a sequence, over a part of
its keys. With a single part it writes the result; otherwise a second kernel combines the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.triton.attention.flash import (
    DECODE_TILE_BYTES,
    cache_arguments,
    join,
    key_tiles,
    mean_value,
    no_key_seen,
    padded,
    query_rows,
    special_arguments,
    tile_arguments,
    visit_keys,
)
from atom.model_ops.kernels.triton.splits import compute_units, fewest_that_fill, side_by_side
from atom.platform import Platform, current_platform

# Programs that a unit runs side by side, by bytes of a stored number: of a small tile of rows, and
# of the largest. Shared memory is the limit on gfx942, else registers.
_RESIDENT = {
    "gfx942": {4: (3, 2), 2: (2, 1), 1: (4, 3)},
    "gfx950": {4: (4, 2), 2: (3, 2), 1: (4, 2)},
    "sm90": {4: (3, 2), 2: (4, 3), 1: (5, 3)},
}
_OTHERS_RESIDENT = {"rocm": "gfx942", "cuda": "sm90", "cpu": "sm90"}
_SHORTEST_SPLIT = 256
_MOST_SPLITS = 128
_LARGEST_ROW_TILE = 64
_REDUCED_AT_ONCE = 16


@triton.jit(
    do_not_specialize=["table_stride", "window", "first_split"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "starts_ptr", "padding_ptr"],
)
def _attend(
    out_ptr, lse_ptr, q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    tables_ptr, lens_ptr, starts_ptr, padding_ptr, sinks_ptr,
    score_scale, softcap, window, table_stride,
    q_token_stride, q_head_stride, block_stride, token_stride, head_stride, first_split,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr,
    WINDOWED: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, KV heads times tiles of rows, splits.

    Without lse_ptr: out [T, heads, d]. With: out [T, heads, splits, d] float32, the mean value of
    each part, and lse [T, heads, splits], log2 of its weight; -inf where it has no key.

    SPLIT=0 splits what a sequence's queries see evenly. Otherwise splits have SPLIT keys from a
    multiple of it on, the first that a query sees is number 0, and the grid has those from
    first_split on; a part without keys is not written.

    With padding_ptr the last keys of a context are nobody's, and not read.
    """
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1) % KV_HEADS
    first_token = tl.load(starts_ptr + sequence)
    num_queries = tl.load(starts_ptr + sequence + 1) - first_token
    context = tl.load(lens_ptr + sequence)
    stored = context
    if padding_ptr is not None:
        stored = context - tl.load(padding_ptr + sequence)
    rows = (tl.program_id(1) // KV_HEADS) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < num_queries * GROUP
    tokens, heads = query_rows(first_token, kv_head, rows, GROUP)
    dims = tl.arange(0, D)
    mask = real[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = tokens * q_token_stride + heads * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)

    # The split is per sequence, over what its own queries can see.
    oldest = context * 0
    if WINDOWED:
        oldest = tl.maximum(context - num_queries - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        begin = (oldest // SPLIT + first_split + tl.program_id(2)) * SPLIT
        end = tl.minimum(begin + SPLIT, stored)
        if CAUSAL:
            last_row = tl.program_id(1) // KV_HEADS * BLOCK_M + BLOCK_M - 1
            last_query = tl.minimum(last_row // GROUP, num_queries - 1)
            end = tl.minimum(end, context - num_queries + last_query + 1)
        # Whole tiles that nobody sees are left out; the others lie as if none were.
        begin = tl.maximum(begin, oldest)
        if (begin >= end) | (tl.program_id(1) // KV_HEADS * BLOCK_M >= num_queries * GROUP):
            return
    else:
        share = tl.cdiv(context - oldest, tl.num_programs(2) * BLOCK_N) * BLOCK_N
        begin = oldest + tl.program_id(2) * share
        end = tl.minimum(begin + share, stored)
    if key_scale_ptr is not None:
        score_scale = score_scale * tl.load(key_scale_ptr)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    head = kv_head * head_stride
    pool = table_ptr, key_ptr + head, value_ptr + head, block_stride, token_stride
    acc, total, top = visit_keys(
        no_key_seen(sinks_ptr, heads, real, BLOCK_M, D), q,
        context - num_queries + rows // GROUP, begin, end,
        pool, score_scale, softcap, window, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOWED, True, CAUSAL,
    )  # fmt: skip
    result = mean_value(acc, total, value_scale_ptr).to(out_ptr.dtype.element_ty)
    places = tokens * NUM_HEADS + heads
    if lse_ptr is not None:
        places = places * tl.num_programs(2) + tl.program_id(2)
        lse = top + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(lse_ptr + places, lse, mask=real)
    tl.store(out_ptr + places[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _reduce(
    out_ptr, parts_ptr, lse_ptr, splits,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Combine parts [rows, splits, d] with weights 2 ** lse [rows, splits] -> out [rows, d]. Grid:
    rows.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    total = tl.zeros([1], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    for begin in range(0, splits, AT_ONCE):
        parts = begin + tl.arange(0, AT_ONCE)
        lse = tl.load(lse_ptr + row * splits + parts, mask=parts < splits, other=float("-inf"))
        # Skip parts without keys, whose values are undefined.
        mask = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = (row * splits + parts)[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(parts_ptr + offsets, mask=mask, other=0.0)
        acc, total, top = join(acc, total, top, values, lse)
    result = acc / tl.where(total == 0.0, 1.0, total)
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


def _on_device(
    causal: bool,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [T, heads, d] over the paged cache -> [T, heads, d].

    The last query of a sequence sits at the last position of its context; the result of a query
    without visible keys is zero. Correct for any number of queries, tuned for at most 16 per
    sequence.

    Args:
        causal: else queries see the keys after them, too.

    Raises:
        ValueError: when the tensors do not fit together.
    """
    where = q, kv_cache, metadata, scale, sliding_window, softcap, sinks
    return attend(compute_units(), *where, causal=causal)


paged_attention = partial(_on_device, True)
block_attention = partial(_on_device, False)


def attend(
    units: int,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """`paged_attention`, else `block_attention`, split to fill `units` compute units."""
    key = kv_cache.key
    rows = metadata.max_seqlen_q * (q.shape[1] // key.shape[2])
    row_tile = min(padded(rows), _LARGEST_ROW_TILE)
    programs = metadata.block_tables.shape[0], key.shape[2] * triton.cdiv(rows, row_tile)
    arguments = {
        **cache_arguments(q, kv_cache, metadata, scale, sliding_window),
        **special_arguments(scale, softcap, sinks),
        **_constants(q, kv_cache, row_tile, causal, 0),
        "padding_ptr": metadata.padding_lens,
        "first_split": 0,
    }
    slots = side_by_side(units, _resident(current_platform(), row_tile, key.dtype))
    reach = visible_keys(metadata, sliding_window)
    splits = num_splits(programs[0] * programs[1], reach, slots)
    return launch_in_parts(_attend, arguments, (*programs, splits), q)


def _resident(platform: Platform, row_tile: int, storage: torch.dtype) -> int:
    known = _RESIDENT.get(platform.arch) or _RESIDENT[_OTHERS_RESIDENT[platform.kind]]
    small, large = known[storage.itemsize]
    return large if row_tile == _LARGEST_ROW_TILE else small


def visible_keys(metadata: AttentionMetadata, sliding_window: int | None) -> int:
    """Most keys that the queries of a sequence see."""
    most = metadata.max_context_len
    return most if sliding_window is None else min(most, sliding_window + metadata.max_seqlen_q - 1)


def attend_fixed_splits(
    split_keys: int,
    first_split: int,
    parts: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    causal: bool,
) -> None:
    """What `attend` computes of splits of `split_keys` keys, in tiles that are always the same.

    Args:
        first_split: number of the first, from that of the oldest key which the sequence's queries
            see on.
        softcap: sinks are added when splits are joined.
        parts: [T, heads, n, d] float32, for the mean values of n splits.
        lse: [T, heads, n] float32, log2 of their weights; not written where there are no keys.
    """
    key, row_tile = kv_cache.key, _LARGEST_ROW_TILE
    rows = metadata.max_seqlen_q * (q.shape[1] // key.shape[2])
    tiles = key.shape[2] * triton.cdiv(rows, row_tile)
    _attend[metadata.block_tables.shape[0], tiles, lse.shape[2]](
        out_ptr=parts,
        lse_ptr=lse,
        **{
            **cache_arguments(q, kv_cache, metadata, scale, sliding_window),
            **special_arguments(scale, softcap, None),
            **_constants(q, kv_cache, row_tile, causal, split_keys),
        },
        padding_ptr=metadata.padding_lens,
        first_split=first_split,
    )


def _constants(
    q: torch.Tensor, kv_cache: KVCacheTensor, row_tile: int, causal: bool, split_keys: int
) -> dict[str, Any]:
    tiles = key_tiles(q, kv_cache, DECODE_TILE_BYTES)
    return {
        **tile_arguments(q, kv_cache.key, tiles),
        "BLOCK_M": row_tile,
        "CAUSAL": causal,
        "SPLIT": split_keys,
        "num_warps": 4,
        # Two tiles of each kind in shared memory; wide types have room for one.
        "num_stages": 2 if tiles.compute == tl.float32 else 3,
    }


def launch_in_parts(
    kernel: Any, arguments: Mapping[str, Any], grid: tuple[int, int, int], q: torch.Tensor
) -> torch.Tensor:
    """Launch an attention kernel on q [T, heads, d], and join the parts of split contexts.

    Args:
        kernel: has the outputs of `_attend`.
        arguments: its other arguments.
        grid: the last of its sizes is the number of splits.
    """
    splits = grid[2]
    out = q.new_empty(q.shape)
    if splits == 1:
        kernel[grid](out_ptr=out, lse_ptr=None, **arguments)
        return out
    num_tokens, num_heads, head_dim = q.shape
    parts = q.new_empty((num_tokens, num_heads, splits, head_dim), dtype=torch.float32)
    lse = q.new_empty((num_tokens, num_heads, splits), dtype=torch.float32)
    kernel[grid](out_ptr=parts, lse_ptr=lse, **arguments)
    join_parts(out, parts, lse)
    return out


def join_parts(out: torch.Tensor, parts: torch.Tensor, lse: torch.Tensor) -> None:
    """Means of parts [T, heads, splits, d] with weights 2 ** lse -> dense out [T, heads, d]."""
    num_tokens, num_heads, splits, head_dim = parts.shape
    width = triton.next_power_of_2(head_dim)
    _reduce[(num_tokens * num_heads,)](out, parts, lse, splits, head_dim, width, _REDUCED_AT_ONCE)


def num_splits(programs: int, context_len: int, slots: int) -> int:
    """Parts of each context of at most `context_len`, from shapes and the device alone."""
    return fewest_that_fill(programs, min(context_len // _SHORTEST_SPLIT, _MOST_SPLITS), slots)
