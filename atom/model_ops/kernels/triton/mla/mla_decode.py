"""MLA attention in the latent space, for a few queries per sequence over a long context.

Queries are first projected into the latent space ("absorbed"), so all heads of all queries of a
sequence are rows that attend to one shared key: the latent and the rotated part. A program computes
up to 64 rows (padded to 16, the minimum of a matrix instruction; so 8 heads per rank run here,
too), and reads each cached token once as both key and value. Which operand of the products comes
first depends on the architecture. The context is split over programs, and a second
kernel combines their results. The output is projected from the latent space to every head's values.

Both projections are one product per head, in torch.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; split contexts as in Flash-Decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.triton.attention.flash import (
    LOG2_E,
    join,
    load_rows,
    padded,
    place_tile,
    soften,
    tile_blocks,
)
from atom.model_ops.kernels.triton.splits import compute_units, fewest_that_fill, side_by_side
from atom.model_ops.kernels.triton.support import refuses_storage
from atom.model_ops.registry import OpQuery
from atom.platform import Platform, current_platform

# Tiles of latent attention in the latent space, by architecture, and how many programs fit.
#
# The compile lane compares the numbers of programs with compiled kernels.

LARGEST_ROW_TILE = 64
_SMALLEST_ROW_TILE = 16


@dataclass(frozen=True)
class DecodeTiles:
    """Launch parameters of `mla_decode`.

    Attributes:
        rows: (query, head) pairs per program.
        keys: cached tokens per iteration.
        latents_first: multiply latents by queries, not queries by latents. Hopper's warp group
            instruction has at least 64 rows; with latents as its rows, few pairs use it, too.
        hoist: compute before the loop over keys what is the same in every turn. On Hopper these
            are also the descriptors of operands, for which registers may not suffice.
        resident: programs that a unit runs side by side.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    latents_first: bool = False
    hoist: bool = True
    resident: int = 1


def decode_tiles(
    platform: Platform, rows: int, dtype: torch.dtype, cache: LatentCacheTensor
) -> DecodeTiles:
    """For so many pairs of a sequence, and products of type `dtype`.

    For a latent of 512 in 16 bits, a tile of 32 keys takes 36 KiB of gfx942's 64 KiB of LDS.
    """
    rows = min(max(int(triton.next_power_of_2(rows)), _SMALLEST_ROW_TILE), LARGEST_ROW_TILE)
    if platform.kind == "rocm":
        return _amd(platform.arch, rows, dtype, cache.latent.dtype)
    if dtype is torch.float32:
        return DecodeTiles(16, 16, 4, 3, resident=2)
    if platform.arch == "sm90":
        return _hopper(rows, cache)
    few = rows == _SMALLEST_ROW_TILE
    return DecodeTiles(rows, 32, 4 if few else 8, 3, resident=2 if few else 1)


def _amd(arch: str, rows: int, dtype: torch.dtype, storage: torch.dtype) -> DecodeTiles:
    # Three stages have two tiles of keys in shared memory, of which others have room for one.
    stages = 3 if arch == "gfx950" else 2
    if dtype is torch.float32:
        return DecodeTiles(16, 16, 4, stages)
    # What more than 16 rows or FP8 need of registers leaves no room for a second program.
    few = rows == 16 and storage.itemsize == 2 and arch == "gfx950"
    return DecodeTiles(rows, 32, 4, stages, resident=2 if few else 1)


def _hopper(rows: int, cache: LatentCacheTensor) -> DecodeTiles:
    # Of smaller blocks, every latent's place takes registers, and so do latents to be converted.
    in_one_block = cache.block_size % 64 == 0
    if in_one_block and cache.latent.itemsize == 2 and rows < LARGEST_ROW_TILE:
        return DecodeTiles(rows, 64, 4, 2, latents_first=True)
    if rows == _SMALLEST_ROW_TILE:
        return DecodeTiles(rows, 32, 4, 3, resident=2)
    if in_one_block:
        # Half of the rows may be empty: of 32 in FP8 a tile of 32 took 1.5 times as long.
        return DecodeTiles(LARGEST_ROW_TILE, 64, 8, 2, hoist=False)
    return (
        DecodeTiles(rows, 32, 8, 3, hoist=False)
        if rows == LARGEST_ROW_TILE
        else DecodeTiles(rows, 16, 8, 3)
    )


# A tile of keys of this width must fit in shared memory.
_LARGEST = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_MAX_SPLITS = 256
# Minimum keys per split: with fewer, combining costs more than it saves.
_LEAST_KEYS = 64
_JOIN_SPLITS = 16
_JOIN_COLUMNS = 128

# Not specialised, so that one compiled kernel serves all batches.
_VARYING = ["table_stride", "splits", "num_rows", "first_split", "num_tiles"]
_JOIN_VARYING = ["splits", "num_rows", "most_rows"]
_SLICES = ["rope_ptr", "tables_ptr", "contexts_ptr", "starts_ptr", "padding_ptr"]


def refuses(query: OpQuery) -> str | None:
    """Why this attention is not supported; None if it is."""
    for name, largest in _LARGEST.items():
        if query.shape[name] > largest:
            return f"{name}={query.shape[name]} is larger than {largest}"
    return refuses_storage(query)


def _decode(
    causal: bool,
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    The last query of a sequence sits at the last position of its context. No host sync.

    Args:
        causal: else queries see the keys after them, too; a context may be shorter than its
            queries then.
    """
    heads, up_rows, rank = up_proj.shape
    nope = q.shape[-1] - (kv_cache.latent.shape[-1] - rank)
    out = q.new_empty(q.shape[0], heads, up_rows - nope)
    attend_absorbed(q, kv_cache, up_proj, metadata, scale, out, causal)
    return out


mla_decode = partial(_decode, True)
mla_block_attention = partial(_decode, False)


def attend_absorbed(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    out: torch.Tensor,
    causal: bool = True,
) -> None:
    """`mla_decode` for any query lengths, into `out` [T, heads, v]."""
    rank = up_proj.shape[2]
    nope = q.shape[-1] - (kv_cache.latent.shape[-1] - rank)
    carried = torch.bmm(q[..., :nope].transpose(0, 1), up_proj[:, :nope])
    seen = _attend(carried, q[..., nope:], kv_cache, metadata, scale, causal)
    torch.bmm(seen.transpose(0, 1), up_proj[:, nope:].transpose(1, 2), out=out.transpose(0, 1))


def num_splits(programs: int, max_context_len: int, slots: int) -> int:
    """Splits of every context, from shapes and the device alone.

    Args:
        programs: their number without splits.
        slots: programs that the device runs side by side.
    """
    most = min(-(-max_context_len // _LEAST_KEYS), _MAX_SPLITS)
    return fewest_that_fill(programs, most, slots)


def _attend(
    carried: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: LatentCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """carried [heads, T, rank], q_rope [T, heads, rope] -> [T, heads, rank]."""
    heads, num_tokens, rank = carried.shape
    latent = kv_cache.latent
    rows = metadata.max_seqlen_q * heads
    tiles = decode_tiles(current_platform(), rows, carried.dtype, kv_cache)
    num_tiles = triton.cdiv(rows, tiles.rows)
    num_seqs = metadata.context_lens.shape[0]
    slots = side_by_side(compute_units(), tiles.resident)
    splits = num_splits(num_tiles * num_seqs, metadata.max_context_len, slots)
    num_rows = num_tokens * heads
    seen = carried.new_empty(num_tokens, heads, rank)
    partial, lse = seen, seen
    if splits > 1:
        partial = carried.new_empty((splits, num_rows, rank), dtype=torch.float32)
        lse = carried.new_empty((splits, num_rows), dtype=torch.float32)
    _absorbed_kernel[(num_tiles * num_seqs, splits)](
        carried, q_rope, latent, kv_cache.scale,
        metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q,
        metadata.padding_lens, partial, lse, scale * LOG2_E,
        q_rope.stride(0), q_rope.stride(1),
        latent.stride(0), latent.stride(1), metadata.block_tables.stride(0), splits, num_rows,
        0, num_tiles,
        HEADS=heads, RANK=rank, ROPE=q_rope.shape[2],
        RANK_PADDED=padded(rank), ROPE_PADDED=padded(q_rope.shape[2]),
        BLOCK_SIZE=kv_cache.block_size, ROWS=tiles.rows, KEYS=tiles.keys,
        LATENTS_FIRST=tiles.latents_first, HOIST=tiles.hoist,
        LEAST_KEYS=_LEAST_KEYS, SPLIT_KEYS=0, SPLIT=splits > 1, CAUSAL=causal,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        columns = min(padded(rank), _JOIN_COLUMNS)
        most_rows = metadata.max_seqlen_q * heads
        _join_kernel[(most_rows * num_seqs, triton.cdiv(rank, columns))](
            partial, lse, metadata.context_lens, metadata.cu_seqlens_q, seen, splits, num_rows,
            most_rows, HEADS=heads, RANK=rank, COLUMNS=columns, TILE=_JOIN_SPLITS, KEYS=tiles.keys,
            LEAST_KEYS=_LEAST_KEYS, num_warps=4,
        )  # fmt: skip
    return seen


def attend_fixed_splits(
    split_keys: int,
    first_split: int,
    parts: torch.Tensor,
    lse: torch.Tensor,
    carried: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: LatentCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    causal: bool = True,
) -> None:
    """What `_attend` computes of splits of `split_keys` keys, in tiles that are always the same.

    Args:
        first_split: number of the first.
        parts: [T, heads, n, rank] float32, for the mean latents of n splits.
        lse: [T, heads, n] float32, log2 of their weights; not written where there are no keys.
    """
    heads, num_tokens, rank = carried.shape
    latent, splits = kv_cache.latent, lse.shape[2]
    tiles = decode_tiles(current_platform(), LARGEST_ROW_TILE, carried.dtype, kv_cache)
    num_tiles = triton.cdiv(metadata.max_seqlen_q * heads, tiles.rows)
    _absorbed_kernel[(num_tiles * metadata.context_lens.shape[0], splits)](
        carried, q_rope, latent, kv_cache.scale,
        metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q,
        metadata.padding_lens, parts, lse, scale * LOG2_E,
        q_rope.stride(0), q_rope.stride(1),
        latent.stride(0), latent.stride(1), metadata.block_tables.stride(0), splits,
        num_tokens * heads, first_split, num_tiles,
        HEADS=heads, RANK=rank, ROPE=q_rope.shape[2],
        RANK_PADDED=padded(rank), ROPE_PADDED=padded(q_rope.shape[2]),
        BLOCK_SIZE=kv_cache.block_size, ROWS=tiles.rows, KEYS=tiles.keys,
        LATENTS_FIRST=tiles.latents_first, HOIST=tiles.hoist,
        LEAST_KEYS=_LEAST_KEYS, SPLIT_KEYS=split_keys, SPLIT=True, CAUSAL=causal,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def _split_keys(context, splits, KEYS: tl.constexpr, LEAST_KEYS: tl.constexpr):
    """Keys per split, a multiple of KEYS; the last splits of a short context are empty."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, splits), KEYS) * KEYS, LEAST_KEYS)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_SLICES)
def _absorbed_kernel(
    carried_ptr,
    rope_ptr,
    cache_ptr,
    scale_ptr,
    tables_ptr,
    contexts_ptr,
    starts_ptr,
    padding_ptr,
    out_ptr,
    lse_ptr,
    softmax_scale,
    rope_token_stride,
    rope_head_stride,
    cache_block_stride,
    cache_token_stride,
    table_stride,
    splits,
    num_rows,
    first_split,
    num_tiles,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENTS_FIRST: tl.constexpr,
    HOIST: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Grid: tiles of rows of sequences, splits. Row r is head r % HEADS of query r // HEADS.

    Results of splits lie by split and row. With SPLIT_KEYS, splits have so many keys from a
    multiple of it on, the grid has those from first_split on, and results lie by row and split.
    With padding_ptr the last keys of a context are nobody's, and not read.
    """
    # A grid has at most 65,535 programs in its second direction, and prompts more queries.
    tile, sequence = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    split = tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    context = tl.load(contexts_ptr + sequence)
    if SPLIT_KEYS:
        span = SPLIT_KEYS
        first = (first_split + split) * SPLIT_KEYS
    else:
        span = _split_keys(context, splits, KEYS, LEAST_KEYS)
        first = split * span
    if (tile * ROWS >= length * HEADS) | (first >= context):
        return
    rows = tile * ROWS + tl.arange(0, ROWS)
    query, head = rows // HEADS, rows % HEADS
    live = query < length
    position = context - length + query  # of each row, which sees the keys up to it
    token = (start + query).to(tl.int64)
    ranks, ropes = tl.arange(0, RANK_PADDED), tl.arange(0, ROPE_PADDED)
    q_latent = tl.load(
        carried_ptr + ((head * (num_rows // HEADS) + token) * RANK)[:, None] + ranks,
        mask=live[:, None] & (ranks < RANK),
        other=0.0,
    )
    q_rope = tl.load(
        rope_ptr + (token * rope_token_stride + head * rope_head_stride)[:, None] + ropes,
        mask=live[:, None] & (ropes < ROPE),
        other=0.0,
    )
    stored_scale = 1.0
    if scale_ptr is not None:
        stored_scale = tl.load(scale_ptr)
    score_scale = softmax_scale * stored_scale
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if LATENTS_FIRST:
        acc = tl.zeros([RANK_PADDED, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, RANK_PADDED], tl.float32)
    last_query = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, length - 1)
    end = tl.minimum(first + span, context - length + last_query + 1 if CAUSAL else context)
    if padding_ptr is not None:
        end = tl.minimum(end, context - tl.load(padding_ptr + sequence))
    last = tl.maximum(end - 1, 0)
    blocks = tile_blocks(table_ptr, first, last, BLOCK_SIZE, KEYS)
    for key in tl.range(first, end, KEYS, disable_licm=not HOIST):
        keys = key + tl.arange(0, KEYS)
        inside = keys < end
        # Past the end the last key is read again; the weights of these are zero.
        tokens = tl.minimum(keys, last)
        base, offsets = place_tile(
            blocks, tokens, cache_block_stride, cache_token_stride, BLOCK_SIZE, KEYS
        )
        blocks = tile_blocks(table_ptr, key + KEYS, last, BLOCK_SIZE, KEYS)
        at = cache_ptr + base + offsets[:, None]
        latent = load_rows(at, RANK, RANK_PADDED).to(q_latent.dtype)
        k_rope = load_rows(at + RANK, ROPE, ROPE_PADDED).to(q_latent.dtype)
        if LATENTS_FIRST:
            scores = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
            scores = tl.dot(k_rope, tl.trans(q_rope), scores, input_precision="ieee")
            scores = tl.trans(scores)
        else:
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        visible = inside[None, :]
        if CAUSAL:
            visible &= keys <= position[:, None]
        scores = tl.where(visible, scores * score_scale, float("-inf"))
        weights, decay, total, top = soften(scores, total, top)
        weights = weights.to(latent.dtype)
        if LATENTS_FIRST:
            acc = acc * decay[None, :]
            acc = tl.dot(tl.trans(latent), tl.trans(weights), acc, input_precision="ieee")
        else:
            acc = acc * decay[:, None]
            acc = tl.dot(weights, latent, acc, input_precision="ieee")
    if LATENTS_FIRST:
        acc = tl.trans(acc)
    total = tl.where(total > 0, total, 1.0)  # rows without keys in this split
    acc = acc * (stored_scale / total)[:, None]
    row = token * HEADS + head
    if SPLIT:
        if SPLIT_KEYS:
            row = row * splits + split
        else:
            row += split.to(tl.int64) * num_rows
        tl.store(lse_ptr + row, top + tl.log2(total), mask=live)
    tl.store(
        out_ptr + row[:, None] * RANK + ranks,
        acc.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (ranks < RANK),
    )


@triton.jit(do_not_specialize=_JOIN_VARYING, do_not_specialize_on_alignment=_SLICES)
def _join_kernel(
    partial_ptr,
    lse_ptr,
    contexts_ptr,
    starts_ptr,
    out_ptr,
    splits,
    num_rows,
    most_rows,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
):
    """Grid: rows of sequences, tiles of columns. Combines the splits, weighted by their sums."""
    row, sequence = tl.program_id(0) % most_rows, tl.program_id(0) // most_rows
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    if row >= length * HEADS:
        return
    context = tl.load(contexts_ptr + sequence)
    used = tl.cdiv(context, _split_keys(context, splits, KEYS, LEAST_KEYS))
    row = start.to(tl.int64) * HEADS + row
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, used, TILE):
        split = first + tl.arange(0, TILE)
        at = split.to(tl.int64) * num_rows + row
        lse = tl.load(lse_ptr + at, mask=split < used, other=float("-inf"))
        part = tl.load(
            partial_ptr + at[:, None] * RANK + columns,
            mask=(split < used)[:, None] & (columns < RANK),
            other=0.0,
        )
        acc, total, top = join(acc, total, top, part, lse)
    tl.store(
        out_ptr + row * RANK + columns,
        (acc / total).to(out_ptr.dtype.element_ty),
        mask=columns < RANK,
    )
