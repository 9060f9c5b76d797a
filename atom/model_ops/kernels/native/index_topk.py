"""The tokens that each query of sparse attention attends to."""

from __future__ import annotations

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.native.attention import (
    check_indices,
    describe_sequence,
    without_padding,
)
from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads
from atom.model_ops.registry import OpQuery

_index = Kernels("index_topk", "9P9q")


def refuses(query: OpQuery) -> str | None:
    if query.storage is query.dtype:
        return None
    return f"the cache holds {query.storage}, the model computes in {query.dtype}"


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: LatentCacheTensor,
    metadata: AttentionMetadata,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As torch's; a query's choice depends on its own sequence only, bit for bit.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when a sequence's lengths or block ids are out of range.
    """
    tokens, heads, size = q.shape
    keys = kv_cache.latent
    num_blocks, block_size, key_size = keys.shape
    if metadata.padding_lens is not None:
        metadata = without_padding(metadata)
    tables, lens, starts = metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q
    if (
        key_size != size
        or keys.dtype is not q.dtype
        or weights.shape != (tokens, heads)
        or weights.dtype is not torch.float32
        or not (q.is_contiguous() and weights.is_contiguous() and keys.is_contiguous())
    ):
        raise mismatch("index_topk", q=q, weights=weights, keys=keys)
    check_indices("index_topk", metadata)
    slots, counts, rows = (
        q.new_empty(shape, dtype=torch.int32)
        for shape in ((tokens, topk), (tokens,), (tokens + 1,))
    )
    inputs = q.data_ptr(), weights.data_ptr(), keys.data_ptr()
    indices = tables.data_ptr(), lens.data_ptr(), starts.data_ptr()
    outputs = slots.data_ptr(), counts.data_ptr(), rows.data_ptr()
    paged = num_blocks, block_size, tables.shape[1], tables.shape[0]
    wrong = _index(
        q.dtype, *inputs, *indices, *outputs, tokens, heads, size, *paged, topk, num_threads()
    )
    if wrong:
        raise IndexError(describe_sequence(metadata, wrong - 1, num_blocks))
    return slots, counts, rows
