"""Paged attention that reads keys and values in place."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import (
    Kernels,
    constant,
    mismatch,
    num_threads,
    rows_apart,
)
from atom.model_ops.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.registry import OpQuery

_write = Kernels("kv_cache_write", "5P5q")
_attention = Kernels("paged_attention", "7P11qd")


def refuses(query: OpQuery) -> str | None:
    if reason := refuses_storage(query):
        return reason
    size, step = query.shape["head_dim"], 2 * constant("lanes")
    return f"head_dim={size} is no multiple of {step}" if size % step else None


def refuses_storage(query: OpQuery) -> str | None:
    if query.storage is query.dtype:
        return None
    return f"the cache holds {query.storage}, the model computes in {query.dtype}"


def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [T, kv_heads, d] to their slots; negative slots are skipped.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a slot beyond the cache.
    """
    key, value = kv_cache.key, kv_cache.value
    num_blocks, block_size, kv_heads, head_dim = key.shape
    shape = k.shape
    rows = shape[0]
    dtype = key.dtype
    if (
        shape != (rows, kv_heads, head_dim)
        or v.shape != shape
        or k.dtype is not dtype
        or v.dtype is not dtype
        or not key.is_contiguous()
        or not value.is_contiguous()
        or slot_mapping.numel() != rows
        or slot_mapping.dtype is not torch.int64
        or not slot_mapping.is_contiguous()
    ):
        raise mismatch("kv_cache_write", k=k, v=v, key=key, slot_mapping=slot_mapping)
    k, k_stride = rows_apart(k)
    v, v_stride = rows_apart(v)
    item = dtype.itemsize
    pointers = slot_mapping.data_ptr(), k.data_ptr(), v.data_ptr()
    caches = key.data_ptr(), value.data_ptr()
    sizes = rows, kv_heads * head_dim * item, num_blocks * block_size
    wrong = _write(None, *pointers, *caches, *sizes, k_stride * item, v_stride * item)
    if wrong:
        raise IndexError(
            f"slot {int(slot_mapping[wrong - 1])} lies beyond a cache of "
            f"{num_blocks} blocks of {block_size} tokens"
        )


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over the paged cache -> [T, heads, d].

    The last query of a sequence sits at the last position of its context. Results depend on the
    query's own sequence only, bit for bit, whatever the batch and the number of queries. Rows of
    tokens beyond the last sequence are zero.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when a sequence's lengths or block ids are out of range.
    """
    tokens, heads, head_dim = q.shape
    key, value = kv_cache.key, kv_cache.value
    num_blocks, block_size, kv_heads, key_dim = key.shape
    tables, lens, starts = (
        metadata.block_tables,
        metadata.context_lens,
        metadata.cu_seqlens_q,
    )
    sequences, width = tables.shape
    dtype = q.dtype
    if (
        key_dim != head_dim
        or heads % kv_heads
        or key.dtype is not dtype
        or value.dtype is not dtype
        or not key.is_contiguous()
        or not value.is_contiguous()
    ):
        raise mismatch("paged_attention", q=q, key=key, value=value)
    if not (_is_index(tables) and _is_index(lens) and _is_index(starts)):
        raise mismatch("paged_attention", tables=tables, context_lens=lens, starts=starts)
    stride = heads * head_dim
    if not q.is_contiguous():
        q, stride = rows_apart(q)
    out = q.new_empty(tokens, heads, head_dim)
    pointers = q.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    indices = tables.data_ptr(), lens.data_ptr(), starts.data_ptr()
    shape = tokens, heads, kv_heads, head_dim, num_blocks, block_size, width, sequences
    limits = stride, sliding_window or 0, num_threads(), scale
    wrong = _attention(dtype, *pointers, *indices, *shape, *limits)
    if wrong:
        raise IndexError(describe_sequence(metadata, wrong - 1, num_blocks))
    return out


def _is_index(x: torch.Tensor) -> bool:
    return x.dtype is torch.int32 and x.is_contiguous()


def describe_sequence(metadata: AttentionMetadata, sequence: int, num_blocks: int) -> str:
    """The numbers of a sequence that a kernel cannot read."""
    queries = metadata.cu_seqlens_q[sequence : sequence + 2].tolist()
    return (
        f"sequence {sequence} has context length {int(metadata.context_lens[sequence])}, "
        f"query rows {queries[0]} to {queries[1]} and blocks "
        f"{metadata.block_tables[sequence].tolist()}, in a cache of {num_blocks} blocks"
    )
