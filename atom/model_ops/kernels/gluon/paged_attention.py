"""Decode and verify attention without grouped queries, for the matrix cores of gfx942 and gfx950.

One wavefront computes one head of one sequence over a part of its keys; up to 16 queries form the
16 rows of an MFMA instruction. No shared memory (LDS) is used, because of these layouts:

- The result of the first product has the layout of the second's left operand (`transposed`).
- A lane reads 16 contiguous bytes of a value row, but in the right operand a lane's columns are 16
  apart. So columns are permuted to the order in which lanes read them, and permuted back when the
  result is written (`PERMUTED`).

Loads of the next keys overlap with the value product, and loads of the next values with the key
product. Splitting long contexts and the reduction are those of the Triton kernel.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES, AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.special_scores import refuses_special_scores
from atom.model_ops.kernels.triton.attention.flash import cache_arguments, describe
from atom.model_ops.kernels.triton.attention.paged_attention import (
    launch_in_parts,
    num_splits,
    visible_keys,
)
from atom.model_ops.kernels.triton.splits import compute_units, side_by_side
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

_LARGEST_TILE = 32  # keys; two tiles of keys and values leave registers for three wavefronts
_GENERATION = {"gfx942": 3, "gfx950": 4}  # of MFMA instructions
_ROWS = gl.constexpr(16)
# Wavefronts that a unit's registers hold, by head size, MFMA generation and bytes of a stored
# number.
_RESIDENT = {64: {3: {2: 16, 1: 16}, 4: {2: 16, 1: 16}}, 128: {3: {2: 12, 1: 12}, 4: {2: 12, 1: 8}}}
_HEAD_DIMS = (64, 128)
_BLOCK_SIZES = (16, 32, 64, 128)


def refuses(query: OpQuery) -> str | None:
    """Why this layer's shape and dtype are not supported; None if they are."""
    shape, native = query.shape, query.platform.fp8_dtype
    if shape["num_heads"] != shape["num_kv_heads"]:
        return (
            f"for layers without grouped queries; num_heads={shape['num_heads']} is not "
            f"num_kv_heads={shape['num_kv_heads']}"
        )
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16, not {query.dtype}"
    if query.storage not in (None, query.dtype, native):
        return f"reads a cache of {query.dtype} or {native}, not {query.storage}"
    if shape["head_dim"] not in _HEAD_DIMS:
        return f"head_dim={shape['head_dim']} is none of {_HEAD_DIMS}"
    if shape["block_size"] not in _BLOCK_SIZES:
        return f"block_size={shape['block_size']} is none of {_BLOCK_SIZES}"
    return refuses_special_scores(query)


@gluon.jit
def _block_offset(
    tile, limit, table_ptr, block_stride, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr
):
    """Offset in the pool of the tile's block; from token `limit` on, of the last block."""
    last = gl.maximum(limit - 1, 0)
    block = gl.load(table_ptr + gl.minimum(tile * KEYS, last) // BLOCK_SIZE)
    return block.to(gl.int64) * block_stride


@gluon.jit
def _load(
    pool_ptr,
    block_offset,
    tile,
    limit,
    token_stride,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Rows [KEYS, D] of a tile, which lies in one block; zeros from token `limit` on."""
    start = tile * KEYS
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    # Buffer load offsets have 32 bits, so the block's offset is added to the 64-bit pointer. Masked
    # elements are zero in hardware; `other` would add a select that waits for the load.
    return gl.amd.cdna3.buffer_load(
        ptr=pool_ptr + block_offset + (start % BLOCK_SIZE) * token_stride,
        offsets=rows[:, None] * token_stride + dims[None, :],
        mask=(start + rows < limit)[:, None],
    )


@gluon.jit
def _scores(q, key, KEYS: gl.constexpr, MMA: gl.constexpr, RIGHT: gl.constexpr):
    """q [16, D] times key [KEYS, D] -> [16, KEYS] float32."""
    right = gl.convert_layout(key.to(q.dtype).trans(1, 0), RIGHT)
    return gl.amd.cdna3.mfma(q, right, gl.zeros((_ROWS, KEYS), gl.float32, layout=MMA))


@gluon.jit
def _weigh(
    acc,
    weights,
    value,
    KEYS: gl.constexpr,
    D: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """acc + weights [16, KEYS] times value [KEYS, D], the columns in the order of `PERMUTED`."""
    value = value.to(weights.dtype).reshape((KEYS, 16, D // 16)).permute((0, 2, 1))
    value = gl.convert_layout(value.reshape((KEYS, D)), RIGHT)
    return gl.amd.cdna3.mfma(gl.convert_layout(weights, LEFT), value, acc)


@gluon.jit
def _soften(
    scores,
    total,
    top,
    tile,
    context,
    positions,
    window,
    KEYS: gl.constexpr,
    WINDOWED: gl.constexpr,
    MMA: gl.constexpr,
):
    """Online softmax over a tile for 16 rows: the tile's weights, the decay of earlier sums, new
    sums.
    """
    tokens = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, MMA))
    seen = tokens[None, :] <= gl.minimum(positions, context - 1)[:, None]
    if WINDOWED:
        seen = seen & (tokens[None, :] > positions[:, None] - window)
    scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    # Without any key so far, -inf - -inf would be NaN.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores - shift[:, None])
    decay = gl.exp2(top - shift)
    return weights, decay, total * decay + gl.sum(weights, 1), new_top


@gluon.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "starts_ptr", "padding_ptr"],
)
def _attend(
    out_ptr, lse_ptr, q_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    tables_ptr, lens_ptr, starts_ptr, padding_ptr, score_scale, window, table_stride,
    q_token_stride, q_head_stride, block_stride, token_stride, head_stride,
    D: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, GENERATION: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Grid: sequences, heads, splits. Outputs are as in the Triton kernel."""
    MMA: gl.constexpr = gl.amd.AMDMFMALayout(
        version=GENERATION, instr_shape=[16, 16, 16], transposed=True, warps_per_cta=[1, 1]
    )
    KEY_LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=8)
    KEY_RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=8)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=4)
    KEY: gl.constexpr = gl.BlockedLayout([1, 8], [16, 4], [1, 1], [0, 1])
    VALUE: gl.constexpr = gl.BlockedLayout([4, D // 16], [4, 16], [1, 1], [1, 0])
    PERMUTED: gl.constexpr = gl.BlockedLayout([1, D // 4], [16, 4], [1, 1], [0, 1])

    sequence = gl.program_id(0)
    head = gl.program_id(1)
    first_token = gl.load(starts_ptr + sequence)
    num_queries = gl.load(starts_ptr + sequence + 1) - first_token
    context = gl.load(lens_ptr + sequence)
    stored = context
    if padding_ptr is not None:
        stored = context - gl.load(padding_ptr + sequence)

    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, KEY))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, KEY))
    q = gl.amd.cdna3.buffer_load(
        ptr=q_ptr + first_token.to(gl.int64) * q_token_stride + head * q_head_stride,
        offsets=rows[:, None] * q_token_stride + dims[None, :],
        mask=(rows < num_queries)[:, None],
    )
    q = gl.convert_layout(q, KEY_LEFT)

    # The split is per sequence, over the tiles that its own queries can see.
    first = context * 0
    if WINDOWED:
        first = gl.maximum(context - num_queries - window + 1, 0) // KEYS
    share = gl.cdiv(gl.cdiv(context, KEYS) - first, gl.num_programs(2))
    begin = first + gl.program_id(2) * share
    end = gl.minimum(begin + share, gl.cdiv(context, KEYS))
    limit = gl.minimum(end * KEYS, stored)
    if key_scale_ptr is not None:
        score_scale = score_scale * gl.load(key_scale_ptr)
    table_ptr = tables_ptr + sequence.to(gl.int64) * table_stride
    key_ptr = key_ptr + head * head_stride
    value_ptr = value_ptr + head * head_stride
    positions = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA)) + context - num_queries
    acc = gl.zeros((_ROWS, D), gl.float32, layout=MMA)
    total = gl.zeros((_ROWS,), gl.float32, layout=gl.SliceLayout(1, MMA))
    top = gl.full((_ROWS,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, MMA))
    block = _block_offset(begin, limit, table_ptr, block_stride, BLOCK_SIZE, KEYS)
    key = _load(key_ptr, block, begin, limit, token_stride, BLOCK_SIZE, KEYS, D, KEY)
    value = _load(value_ptr, block, begin, limit, token_stride, BLOCK_SIZE, KEYS, D, VALUE)
    block = _block_offset(begin + 1, limit, table_ptr, block_stride, BLOCK_SIZE, KEYS)
    # A tile is loaded as soon as the product has read the registers of the one before.
    for tile in range(begin, end):
        ahead = tile + 1
        scores = _scores(q, key, KEYS, MMA, KEY_RIGHT) * score_scale
        key = _load(key_ptr, block, ahead, limit, token_stride, BLOCK_SIZE, KEYS, D, KEY)
        weights, decay, total, top = _soften(
            scores, total, top, tile, context, positions, window, KEYS, WINDOWED, MMA
        )
        weights = weights.to(q.dtype)
        acc = _weigh(acc * decay[:, None], weights, value, KEYS, D, LEFT, RIGHT)
        value = _load(value_ptr, block, ahead, limit, token_stride, BLOCK_SIZE, KEYS, D, VALUE)
        block = _block_offset(ahead + 1, limit, table_ptr, block_stride, BLOCK_SIZE, KEYS)

    result = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    if value_scale_ptr is not None:
        result = result * gl.load(value_scale_ptr)
    stride = gl.num_programs(1) * gl.num_programs(2)
    place = first_token.to(gl.int64) * stride + head * gl.num_programs(2) + gl.program_id(2)
    if lse_ptr is not None:
        lse = top + gl.log2(gl.where(total == 0.0, 1.0, total))
        rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA))
        gl.amd.cdna3.buffer_store(
            lse, ptr=lse_ptr + place, offsets=rows * stride, mask=rows < num_queries
        )
    result = result.to(out_ptr.dtype.element_ty).reshape((_ROWS, D // 16, 16)).permute((0, 2, 1))
    result = gl.convert_layout(result.reshape((_ROWS, D)), PERMUTED)
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, PERMUTED))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, PERMUTED))
    gl.amd.cdna3.buffer_store(
        result,
        ptr=out_ptr + place * D,
        offsets=rows[:, None] * (stride * D) + dims[None, :],
        mask=(rows < num_queries)[:, None],
    )


def paged_attention(
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
        ValueError: when the tensors do not fit together, or for more than 16 queries a sequence.
    """
    generation = _GENERATION[current_platform().arch]
    return attend(generation, compute_units(), q, kv_cache, metadata, scale, sliding_window)


def attend(
    generation: int,
    units: int,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """`paged_attention` for MFMA generation 3 or 4, split to fill `units` compute units."""
    _check(q, kv_cache, metadata)
    block_size, num_heads, head_dim = kv_cache.key.shape[1:]
    arguments = {
        **cache_arguments(q, kv_cache, metadata, scale, sliding_window),
        "D": head_dim,
        "BLOCK_SIZE": block_size,
        "KEYS": min(block_size, _LARGEST_TILE),
        "GENERATION": generation,
        "padding_ptr": metadata.padding_lens,
        "num_warps": 1,
    }
    sequences, reach = metadata.block_tables.shape[0], visible_keys(metadata, sliding_window)
    resident = _RESIDENT[head_dim][generation][kv_cache.key.dtype.itemsize]
    slots = side_by_side(units, resident)
    splits = num_splits(sequences * num_heads, reach, slots)
    return launch_in_parts(_attend, arguments, (sequences, num_heads, splits), q)


def _check(q: torch.Tensor, kv_cache: KVCacheTensor, metadata: AttentionMetadata) -> None:
    key, value = kv_cache.key, kv_cache.value
    if (
        key.shape != value.shape
        or key.stride() != value.stride()
        or key.shape[2:] != q.shape[1:]
        or key.stride(3) != 1
        or q.stride(2) != 1
    ):
        raise ValueError(
            f"attention without grouped queries wants q [T, heads, d], and keys and values that "
            f"lie alike in [blocks, block_size, heads, d], d dense; given q {describe(q)}, key "
            f"{describe(key)}, value {describe(value)}"
        )
    if metadata.max_seqlen_q > MAX_DECODE_QUERIES:
        raise ValueError(
            f"{metadata.max_seqlen_q} queries of a sequence; at most {MAX_DECODE_QUERIES} fit: "
            "prefill_attention takes more"
        )
