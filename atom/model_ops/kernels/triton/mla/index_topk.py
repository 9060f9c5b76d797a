"""The indexer of sparse attention: scores by a kernel, the choice by torch.

A program computes the scores of a tile of keys for one query: the products of all its heads and the
keys are one matrix product, whose columns are weighted and summed at once, so that the products of
single heads are in no memory.

Source: DeepSeek-V3.2-Exp's report, section 2.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.torch.index_topk import QueryPlaces, choose
from atom.model_ops.kernels.torch.paged import longest_context
from atom.model_ops.kernels.triton.attention.flash import load_rows, padded, place_tile, tile_blocks
from atom.model_ops.registry import OpQuery

# Scores that are in memory together, unless one query has more; the choice takes 24 bytes of each.
_MOST_SCORES = 1 << 23
_KEYS = 64
# Queries and keys of this size must fit in shared memory.
_LARGEST = {"index_n_heads": 64, "index_head_dim": 128}
# The least of a matrix instruction.
_LEAST_HEADS = 16


def refuses(query: OpQuery) -> str | None:
    """Why it is not supported; None if it is."""
    for name, largest in _LARGEST.items():
        if query.shape[name] > largest:
            return f"{name}={query.shape[name]} is larger than {largest}"
    if query.storage is not query.dtype:
        return f"the cache holds {query.storage}, the model computes in {query.dtype}"
    return None


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: LatentCacheTensor,
    metadata: AttentionMetadata,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As torch's. No host sync."""
    places = QueryPlaces.of(metadata, q.shape[0])
    longest = longest_context(metadata, list(range(len(metadata.query_lens_cpu))))
    tokens, block_size = q.shape[0], kv_cache.block_size
    width = min(topk, longest)
    if longest <= topk:
        everything = torch.arange(longest, device=q.device).expand(tokens, -1)
        return places.slots(everything, metadata, block_size), places.seen, places.starts
    at_once = max(1, _MOST_SCORES // longest)
    slots = q.new_empty(tokens, width, dtype=torch.int32)
    for first in range(0, tokens, at_once):
        some = slice(first, first + at_once)
        own = places.select(some)
        scores = score(q[some], weights[some], kv_cache, metadata, own, longest)
        slots[some] = own.slots(choose(scores, own.seen, topk), metadata, block_size)
    return slots, places.seen.clamp(max=topk), places.starts


def score(
    q: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: LatentCacheTensor,
    metadata: AttentionMetadata,
    places: QueryPlaces,
    longest: int,
) -> torch.Tensor:
    """q [R, heads, size], weights [R, heads] -> [R, longest] float32; anything where nothing is
    seen.
    """
    rows, heads, size = q.shape
    keys = kv_cache.latent
    scores = torch.empty(rows, longest, dtype=torch.float32, device=q.device)
    # Rows first: the grid's other dimensions are small.
    _score_kernel[(rows, triton.cdiv(longest, _KEYS))](
        q, weights, keys, metadata.block_tables, places.sequence, places.seen, scores,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1),
        metadata.block_tables.stride(0), longest,
        HEADS=heads, SIZE=size,
        HEADS_PADDED=max(padded(heads), _LEAST_HEADS), SIZE_PADDED=padded(size),
        BLOCK_SIZE=kv_cache.block_size, KEYS=_KEYS, num_warps=4,
    )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["table_stride", "longest"])
def _score_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    tables_ptr,
    sequences_ptr,
    seen_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    block_stride,
    token_stride,
    table_stride,
    longest,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid: queries, tiles of keys."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * KEYS
    seen = tl.load(seen_ptr + row)
    if first >= seen:
        return
    heads, columns = tl.arange(0, HEADS_PADDED), tl.arange(0, SIZE_PADDED)
    q = tl.load(
        q_ptr + row * q_token_stride + heads[:, None] * q_head_stride + columns,
        mask=(heads[:, None] < HEADS) & (columns < SIZE),
        other=0.0,
    )
    weights = tl.load(weights_ptr + row * HEADS + heads, mask=heads < HEADS, other=0.0)
    last = seen - 1
    tokens = tl.minimum(first + tl.arange(0, KEYS), last)
    table_ptr = tables_ptr + tl.load(sequences_ptr + row) * table_stride
    blocks = tile_blocks(table_ptr, first, last, BLOCK_SIZE, KEYS)
    base, offsets = place_tile(blocks, tokens, block_stride, token_stride, BLOCK_SIZE, KEYS)
    keys = load_rows(keys_ptr + base + offsets[:, None], SIZE, SIZE_PADDED)
    products = tl.dot(q, tl.trans(keys), input_precision="ieee")
    scores = tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)
    places = first + tl.arange(0, KEYS)
    tl.store(out_ptr + row * longest + places, scores, mask=places < seen)
