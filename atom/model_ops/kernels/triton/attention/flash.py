"""Shared by the paged attention kernels: a pass over keys with an online softmax.

The query heads of one KV head are treated as extra queries, so keys and values are read once for
all of them: row r of a sequence is query r // GROUP, head r % GROUP of the group. Scores, sums and
softmax are float32; scores are in log2 units, since the hardware has exp2.
Source: Dao et al., FlashAttention, arXiv 2205.14135; Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.triton.support import refuses_storage
from atom.model_ops.registry import OpQuery

LOG2_E = 1.4426950408889634
# Matrix instructions need 16 rows; smaller products are computed slowly without them.
SMALLEST_TILE = 16
PREFILL_TILE_BYTES = 16384
# Half as many leave shared memory for a tile ahead, also for two programs of gfx942.
DECODE_TILE_BYTES = 8192
_LARGEST_KEY_TILE = 64
_LARGEST_HEAD = 256
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def refuses(query: OpQuery) -> str | None:
    """Why this attention is not supported; None if it is."""
    head_dim = query.shape["head_dim"]
    if head_dim > _LARGEST_HEAD:
        return f"head_dim={head_dim} is larger than {_LARGEST_HEAD}"
    return refuses_storage(query)


@triton.jit
def load_rows(row_ptrs, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The SIZE elements from each of row_ptrs [N, 1] on, and zeros: [N, PADDED].

    Unmasked if possible: on AMD GPUs masked loads from a pool beyond 2 GiB are branches, which make
    registers spill.
    """
    columns = tl.arange(0, PADDED)[None, :]
    if SIZE == PADDED:
        return tl.load(row_ptrs + columns)
    return tl.load(row_ptrs + columns, mask=columns < SIZE, other=0.0)


@triton.jit
def tile_blocks(table_ptr, start, last, BLOCK_SIZE: tl.constexpr, N: tl.constexpr):
    """The block of the tile of N tokens from `start` on, or that of each token if there are more.

    `start` is a multiple of N; tokens after `last` count as that one. A loop loads the blocks of a
    tile one turn ahead: with them, the compiler loads the tile itself ahead as well.
    """
    tokens = start
    if BLOCK_SIZE % N != 0:
        tokens = start + tl.arange(0, N)
    return tl.load(table_ptr + tl.minimum(tokens, last) // BLOCK_SIZE)


@triton.jit
def place_tile(
    blocks, tokens, block_stride, token_stride, BLOCK_SIZE: tl.constexpr, N: tl.constexpr
):
    """Where tokens [N] lie in a pool: a base, and offsets from it.

    The offset of a single block is a scalar of 64 bits, and those within it have 32 bits: beyond
    2 GiB, 64 bits for each token take registers.
    """
    base = blocks.to(tl.int64) * block_stride
    offsets = tokens % BLOCK_SIZE * token_stride
    if BLOCK_SIZE % N != 0:
        offsets += base
        base = 0
    return base, offsets


@triton.jit
def soften(scores, total, top):
    """Continue the online softmax of M rows with scores [M, N], in log2 units.

    total [M] and top [M]: sum of weights and maximum score so far.

    Returns:
        Weights [M, N], decay [M] of the earlier sums, new total and top.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Without any key so far, -inf - -inf would be NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    return weights, decay, total * decay + tl.sum(weights, 1), new_top


@triton.jit
def join(acc, total, top, values, lse):
    """Continue a weighted mean with values [N, D] of weights 2 ** lse [N]: the new sums.

    acc [D]; total and top are as in `soften`. An lse of -inf counts nothing.
    """
    new_top = tl.maximum(top, tl.max(lse, 0))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(lse - shift)
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 0)
    return acc * decay + tl.sum(values * weights[:, None], 0), total, new_top


@triton.jit
def query_rows(first_token, kv_head, rows, GROUP: tl.constexpr):
    """Tokens (int64) and heads of the rows of a sequence that starts at `first_token`."""
    return first_token.to(tl.int64) + rows // GROUP, kv_head * GROUP + rows % GROUP


@triton.jit
def visit_keys(
    state, q, positions, begin, end, pool, score_scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr = True,
):  # fmt: skip
    """Continue the softmax over keys begin .. end of one sequence and one KV head.

    `state` is (acc [M, D], total [M], top [M]): weighted values, and sums as in `soften`. q [M, D],
    query positions [M]. `pool` is (block table, keys and values of the head, strides of a block and
    a token). `begin` is a multiple of BLOCK_N. MASKED=False: every query sees every key, and `end`
    is such a multiple, too. With `softcap`, scaled scores are the argument of its tanh
    (`special_arguments`). CAUSAL=False: a query sees the keys after it, too.
    """
    acc, total, top = state
    table_ptr, key_ptr, value_ptr, block_stride, token_stride = pool
    D: tl.constexpr = q.shape[1]
    last = tl.maximum(end - 1, 0)
    blocks = tile_blocks(table_ptr, begin, last, BLOCK_SIZE, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        stored = tokens
        if MASKED:
            # The last key is read again: the weights of these are zero.
            stored = tl.minimum(tokens, last)
        base, offsets = place_tile(blocks, stored, block_stride, token_stride, BLOCK_SIZE, BLOCK_N)
        blocks = tile_blocks(table_ptr, start + BLOCK_N, last, BLOCK_SIZE, BLOCK_N)
        key = load_rows(key_ptr + base + offsets[:, None], HEAD_DIM, D).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * score_scale
        if softcap is not None:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if MASKED:
            seen = (tokens < end)[None, :]
            if CAUSAL:
                seen = seen & (tokens[None, :] <= positions[:, None])
            if WINDOWED:
                seen = seen & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        weights, decay, total, top = soften(scores, total, top)
        value = load_rows(value_ptr + base + offsets[:, None], HEAD_DIM, D).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, total, top


@triton.jit
def nothing_seen(M: tl.constexpr, D: tl.constexpr):
    """The state of M rows before their first key."""
    acc = tl.zeros([M, D], tl.float32)
    return acc, tl.zeros([M], tl.float32), tl.full([M], float("-inf"), tl.float32)


@triton.jit
def no_key_seen(sinks_ptr, heads, real, M: tl.constexpr, D: tl.constexpr):
    """The same, for the first split that of rows which have seen the sinks of their heads.

    With sinks_ptr, splits are numbered by the third dimension of the grid.
    """
    acc, total, top = nothing_seen(M, D)
    if sinks_ptr is not None:
        seen = real & (tl.program_id(2) == 0)
        sinks = tl.load(sinks_ptr + heads, mask=seen, other=float("-inf"))
        top = to_log2(sinks)
        total = tl.where(seen, 1.0, total)
    return acc, total, top


@triton.jit
def to_log2(scores):
    """Scores in log2 units."""
    return scores * 1.4426950408889634


@triton.jit
def mean_value(acc, total, scale_ptr):
    """acc [M, D] / total [M], times the value scale; zero for a row without keys."""
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if scale_ptr is not None:
        mean = mean * tl.load(scale_ptr)
    return mean


@dataclass(frozen=True)
class KeyTiles:
    """Tile sizes.

    Attributes:
        compute: Triton's type of the products.
        width: head size, padded to a power of two.
        keys: keys per tile.
    """

    compute: tl.dtype
    width: int
    keys: int


def key_tiles(q: torch.Tensor, kv_cache: KVCacheTensor, tile_bytes: int) -> KeyTiles:
    """The tiles for q [T, heads, d] over a cache, of at most `tile_bytes` where that is 16 keys.

    FP8 keys are converted to the dtype of q. Two different wider dtypes are both converted to
    float32.

    Raises:
        ValueError: when the tensors do not match.
    """
    key, value = kv_cache.key, kv_cache.value
    if (
        key.shape != value.shape
        or key.stride() != value.stride()
        or key.dtype != value.dtype
        or key.shape[3] != q.shape[2]
        or q.shape[1] % key.shape[2]
        or key.stride(3) != 1
        or q.stride(2) != 1
    ):
        raise ValueError(
            f"attention wants queries [T, heads, d], and keys and values that lie alike in "
            f"[blocks, block_size, kv_heads, d], kv_heads a divisor of heads and d dense; given "
            f"q {describe(q)}, key {describe(key)}, value {describe(value)}"
        )
    same = key.dtype == q.dtype or key.dtype.itemsize == 1
    compute = q.dtype if same else torch.float32
    width = padded(q.shape[2])
    keys = min(max(tile_bytes // (width * compute.itemsize), SMALLEST_TILE), _LARGEST_KEY_TILE)
    return KeyTiles(_TRITON_DTYPES[compute], width, keys)


def padded(size: int) -> int:
    """A width that matrix instructions support; elements beyond `size` are masked."""
    return max(int(triton.next_power_of_2(size)), SMALLEST_TILE)


def cache_arguments(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Launch arguments of all paged attention kernels, by name."""
    key = kv_cache.key
    return {
        "q_ptr": q,
        "key_ptr": key,
        "value_ptr": kv_cache.value,
        "key_scale_ptr": kv_cache.key_scale,
        "value_scale_ptr": kv_cache.value_scale,
        "tables_ptr": metadata.block_tables,
        "lens_ptr": metadata.context_lens,
        "starts_ptr": metadata.cu_seqlens_q,
        "score_scale": scale * LOG2_E,
        "window": sliding_window or 0,
        "table_stride": metadata.block_tables.stride(0),
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "block_stride": key.stride(0),
        "token_stride": key.stride(1),
        "head_stride": key.stride(2),
        "WINDOWED": sliding_window is not None,
    }


def special_arguments(
    scale: float, softcap: float | None, sinks: torch.Tensor | None
) -> dict[str, Any]:
    """Further arguments of those that take a cap and sinks, instead of others by their name.

    With a cap, tanh(x) is computed as 1 - 2 / (2 ** (2 log2(e) x) + 1).
    """
    if softcap is None:
        return {"softcap": None, "sinks_ptr": sinks}
    factors = {"score_scale": 2 * scale * LOG2_E / softcap, "softcap": softcap * LOG2_E}
    return {**factors, "sinks_ptr": sinks}


def tile_arguments(q: torch.Tensor, key: torch.Tensor, tiles: KeyTiles) -> dict[str, Any]:
    """Constants of a kernel for grouped query heads, by name."""
    num_heads, head_dim = q.shape[1:]
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // key.shape[2],
        "HEAD_DIM": head_dim,
        "D": tiles.width,
        "BLOCK_SIZE": key.shape[1],
        "BLOCK_N": tiles.keys,
        "COMPUTE": tiles.compute,
    }


def describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} strides {list(x.stride())}"
