"""Latent attention that reads the cache in place."""

from __future__ import annotations

from functools import partial

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.native.attention import (
    check_indices,
    describe_sequence,
    is_scale,
    without_padding,
)
from atom.model_ops.kernels.native.attention import refuses as refuses_storage
from atom.model_ops.kernels.native.bindings import (
    Kernels,
    constant,
    mismatch,
    num_threads,
    rows_apart,
)
from atom.model_ops.registry import OpQuery

_write = Kernels("mla_cache_write", "5P6q")
_attention = Kernels("mla_attention", "8P13qd")


def refuses(query: OpQuery) -> str | None:
    if reason := refuses_storage(query):
        return reason
    rank, step = query.shape["kv_lora_rank"], 2 * constant("lanes")
    return f"kv_lora_rank={rank} is no multiple of {step}" if rank % step else None


def mla_cache_write(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: LatentCacheTensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write latent [T, rank] and k_rope [T, rope] to their slots; negative slots are skipped.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a slot beyond the cache.
    """
    cache = kv_cache.latent
    num_blocks, block_size, width = cache.shape
    rows, rank = latent.shape
    dtype = latent.dtype
    if (
        k_rope.shape != (rows, width - rank)
        or k_rope.dtype is not dtype
        or slot_mapping.numel() != rows
        or slot_mapping.dtype is not torch.int64
        or not slot_mapping.is_contiguous()
    ):
        operands = {"latent": latent, "k_rope": k_rope, "cache": cache, "slots": slot_mapping}
        raise mismatch("mla_cache_write", **operands)
    cached = _cache_pointers("mla_cache_write", kv_cache, latent)
    latent, latent_stride = rows_apart(latent)
    k_rope, rope_stride = rows_apart(k_rope)
    pointers = slot_mapping.data_ptr(), latent.data_ptr(), k_rope.data_ptr()
    sizes = rows, rank, width - rank, num_blocks * block_size
    wrong = _write(dtype, *pointers, *cached, *sizes, latent_stride, rope_stride)
    if wrong:
        raise IndexError(
            f"slot {int(slot_mapping[wrong - 1])} lies beyond a cache of "
            f"{num_blocks} blocks of {block_size} tokens"
        )


def _attend(
    causal: bool,
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    up_proj [heads, nope + v, rank] is absorbed, whatever the number of queries: results depend on
    the query's own sequence only, bit for bit. Rows of tokens beyond the last sequence are zero.

    Args:
        causal: else queries see the keys after them, too; a context may be shorter than its
            queries then.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when a sequence's lengths or block ids are out of range.
    """
    tokens, heads, head_dim = q.shape
    up_heads, up_rows, rank = up_proj.shape
    cache = kv_cache.latent
    num_blocks, block_size, width = cache.shape
    rope = width - rank
    nope = head_dim - rope
    if metadata.padding_lens is not None:
        metadata = without_padding(metadata)
    tables, lens, starts = metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q
    sequences, table_width = tables.shape
    dtype = q.dtype
    if (
        up_heads != heads
        or not 0 <= rope < width
        or not 0 < nope < up_rows
        or up_proj.dtype is not dtype
        or not up_proj.is_contiguous()
    ):
        raise mismatch("mla_attention", q=q, latent=cache, up_proj=up_proj)
    check_indices("mla_attention", metadata)
    cache_at, scale_at = _cache_pointers("mla_attention", kv_cache, q)
    q, stride = rows_apart(q)
    out = q.new_empty(tokens, heads, up_rows - nope)
    pointers = q.data_ptr(), cache_at, up_proj.data_ptr(), out.data_ptr()
    indices = tables.data_ptr(), lens.data_ptr(), starts.data_ptr(), scale_at
    shape = tokens, heads, nope, rope, up_rows - nope, rank
    paged = num_blocks, block_size, table_width, sequences
    last = stride, causal, num_threads()
    wrong = _attention(dtype, *pointers, *indices, *shape, *paged, *last, scale)
    if wrong:
        raise IndexError(describe_sequence(metadata, wrong - 1, num_blocks))
    return out


mla_attention = partial(_attend, True)
mla_block_attention = partial(_attend, False)


def _cache_pointers(op: str, kv_cache: LatentCacheTensor, x: torch.Tensor) -> tuple[int, int]:
    """Addresses of latents and their scale; the latter is 0 unless the cache is FP8.

    Raises:
        ValueError: when the cache does not hold what an op computing in x's type can read.
    """
    cache, scale = kv_cache.latent, kv_cache.scale
    if cache.is_contiguous() and cache.dtype is x.dtype and scale is None:
        return cache.data_ptr(), 0
    if cache.is_contiguous() and cache.dtype is torch.float8_e4m3fn and is_scale(scale):
        return cache.data_ptr(), scale.data_ptr()
    raise mismatch(op, x=x, latent=cache)
