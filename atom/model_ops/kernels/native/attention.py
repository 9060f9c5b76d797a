"""Paged attention that reads keys and values in place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeGuard

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.native.bindings import (
    Kernels,
    mismatch,
    num_threads,
    rows_apart,
)
from atom.model_ops.registry import OpQuery

_write = Kernels("kv_cache_write", "7P8q")
_attention = Kernels("paged_attention", "10P13q2d")


def refuses(query: OpQuery) -> str | None:
    if query.storage in (query.dtype, torch.float8_e4m3fn):
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
    key = kv_cache.key
    num_blocks, block_size, kv_heads, head_dim = key.shape
    shape = k.shape
    rows = shape[0]
    dtype = k.dtype
    if (
        shape != (rows, kv_heads, head_dim)
        or v.shape != shape
        or v.dtype is not dtype
        or slot_mapping.numel() != rows
        or slot_mapping.dtype is not torch.int64
        or not slot_mapping.is_contiguous()
    ):
        raise mismatch("kv_cache_write", k=k, v=v, key=key, slot_mapping=slot_mapping)
    caches = _cache_pointers("kv_cache_write", kv_cache, k)
    k, k_stride = rows_apart(k)
    v, v_stride = rows_apart(v)
    pointers = slot_mapping.data_ptr(), k.data_ptr(), v.data_ptr()
    sizes = rows, kv_heads * head_dim, num_blocks * block_size, block_size
    strides = key.stride(0) * key.itemsize, k_stride, v_stride
    wrong = _write(dtype, *pointers, *caches, *sizes, *strides, num_threads())
    if wrong:
        raise IndexError(
            f"slot {int(slot_mapping[wrong - 1])} lies beyond a cache of "
            f"{num_blocks} blocks of {block_size} tokens"
        )


def _attend(
    op: str,
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

    The last query of a sequence sits at the last position of its context. Results depend on the
    query's own sequence only, bit for bit, whatever the batch and the number of queries. Rows of
    tokens beyond the last sequence are zero. Weights of values are rounded to bfloat16 where the
    processor multiplies tiles or pairs of that.

    Args:
        op: its name in errors.
        causal: else queries see the keys after them, too.
        scale: of the scores; positive.
        softcap: scaled scores s become softcap * tanh(s / softcap).
        sinks: [heads] float32, a score more in each head's softmax, whose value is 0.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when a sequence's lengths or block ids are out of range.
    """
    tokens, heads, head_dim = q.shape
    key, value = kv_cache.key, kv_cache.value
    num_blocks, block_size, kv_heads, key_dim = key.shape
    if metadata.padding_lens is not None:
        metadata = without_padding(metadata)
    tables, lens, starts = (
        metadata.block_tables,
        metadata.context_lens,
        metadata.cu_seqlens_q,
    )
    sequences, width = tables.shape
    dtype = q.dtype
    if key_dim != head_dim or heads % kv_heads:
        raise mismatch(op, q=q, key=key, value=value)
    check_indices(op, metadata)
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype is not torch.float32):
        raise mismatch(op, q=q, sinks=sinks)
    key_at, value_at, *scales = _cache_pointers(op, kv_cache, q)
    stride = heads * head_dim
    if not q.is_contiguous():
        q, stride = rows_apart(q)
    out = q.new_empty(tokens, heads, head_dim)
    pointers = q.data_ptr(), key_at, value_at, out.data_ptr()
    indices = tables.data_ptr(), lens.data_ptr(), starts.data_ptr()
    shape = tokens, heads, kv_heads, head_dim, num_blocks, block_size, width, sequences
    block_bytes = key.stride(0) * key.itemsize
    sinks_at = 0 if sinks is None else sinks.data_ptr()
    limits = block_bytes, stride, sliding_window or 0, causal, num_threads(), scale, softcap or 0.0
    wrong = _attention(dtype, *pointers, *indices, *scales, sinks_at, *shape, *limits)
    if wrong:
        raise IndexError(describe_sequence(metadata, wrong - 1, num_blocks))
    return out


paged_attention = partial(_attend, "paged_attention", True)
block_attention = partial(_attend, "block_attention", False)


def _cache_pointers(op: str, kv_cache: KVCacheTensor, x: torch.Tensor) -> tuple[int, int, int, int]:
    """Addresses of keys, values and their scales; the latter are 0 unless the cache is FP8. A
    block's keys, and its values, are contiguous, blocks any bytes apart.

    Raises:
        ValueError: when the cache does not hold what an op computing in x's type can read.
    """
    key, value = kv_cache.key, kv_cache.value
    scales = kv_cache.key_scale, kv_cache.value_scale
    _, _, kv_heads, head_dim = key.shape
    strides = key.stride()
    fits = (
        strides[1:] == (kv_heads * head_dim, head_dim, 1)
        and value.stride() == strides
        and value.shape == key.shape
    )
    if fits and key.dtype is value.dtype is x.dtype and scales == (None, None):
        return key.data_ptr(), value.data_ptr(), 0, 0
    if fits and key.dtype is value.dtype is torch.float8_e4m3fn:
        key_scale, value_scale = scales
        if is_scale(key_scale) and is_scale(value_scale):
            return (
                key.data_ptr(),
                value.data_ptr(),
                key_scale.data_ptr(),
                value_scale.data_ptr(),
            )
    raise mismatch(op, x=x, key=key, value=value)


def is_scale(x: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return x is not None and x.dtype is torch.float32 and x.shape == (1,)


def check_indices(op: str, metadata: AttentionMetadata) -> None:
    """Check what says where each sequence's tokens are.

    Raises:
        ValueError: for other types than the kernels read.
    """
    tables, lens, starts = metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q
    if not all(x.dtype is torch.int32 and x.is_contiguous() for x in (tables, lens, starts)):
        raise mismatch(op, tables=tables, context_lens=lens, starts=starts)


def without_padding(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same rows, where those that pad a graph's sequences are sequences of their own: no other
    row is computed with keys that nobody wrote.
    """
    padding = metadata.padding_lens
    assert padding is not None

    def split() -> AttentionMetadata:
        starts, ends = metadata.cu_seqlens_q[:-1], metadata.cu_seqlens_q[1:]
        begins = torch.stack((starts, ends - padding), dim=1).flatten()
        lens = torch.stack((metadata.context_lens - padding, padding.clamp(min=1)), dim=1)
        return replace(
            metadata,
            block_tables=metadata.block_tables.repeat_interleave(2, dim=0),
            block_counts=metadata.block_counts.repeat_interleave(2),
            context_lens=lens.flatten(),
            cu_seqlens_q=torch.cat((begins, ends[-1:])),
            padding_lens=None,
        )

    return metadata.derive("without padding", split)


def describe_sequence(metadata: AttentionMetadata, sequence: int, num_blocks: int) -> str:
    """The numbers of a sequence that a kernel cannot read."""
    queries = metadata.cu_seqlens_q[sequence : sequence + 2].tolist()
    return (
        f"sequence {sequence} has context length {int(metadata.context_lens[sequence])}, "
        f"query rows {queries[0]} to {queries[1]} and blocks "
        f"{metadata.block_tables[sequence].tolist()}, in a cache of {num_blocks} blocks"
    )
