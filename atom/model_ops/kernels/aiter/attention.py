"""Attention over a paged KV cache with aiter: decode, verify and prefill.

Unified attention reads both layouts in place, with any mix of query lengths. Layers without grouped
queries (an Eagle3 draft's) decode with the Gluon kernel, which needs a packed pool.
Where most tokens are new, keys and values are copied out of the pool for flash attention. aiter's
assembly `pa_*` kernels are not used: they read 16 bits of a block id, so pools of more than 65,535
blocks would silently give wrong results.
"""

from __future__ import annotations

from functools import partial

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.aiter.sequences import context_tokens, equal_queries
from atom.model_ops.kernels.aiter.support import refuses_storage, requires
from atom.model_ops.kernels.packed_cache import (
    FLASH_ATTENTION,
    GLUON_DECODE,
    UNIFIED_ATTENTION,
    CacheLayout,
    PackedLayout,
    PlainLayout,
    refuses_packed,
)
from atom.model_ops.kernels.probe import function
from atom.model_ops.kernels.special_scores import refuses_special_scores
from atom.model_ops.registry import OpQuery

_PLAIN, _PACKED = PlainLayout(), PackedLayout()

# Up to so many queries a sequence, each may be a sequence of its own for the Gluon kernel.
_GLUON_QUERIES = 4
# Context tokens per iteration of the Gluon kernel, and programs per sequence: always as many, since
# its last step is compiled for each number.
_PARTITION = 256
_PARTITIONS = 16
# Programs to fill the device: two per compute unit of the largest (304).
_PROGRAMS = 608
_MAX_HEAD_DIM = 256
# Beyond this ratio of cached to new tokens, copying costs more than it saves.
_MOST_CONTEXT_A_QUERY = 2


def _refuses_sizes(query: OpQuery) -> str | None:
    """Why aiter's unified attention cannot run; None if it can."""
    shape = query.shape
    if shape["head_dim"] > _MAX_HEAD_DIM:
        return f"head_dim={shape['head_dim']} is above {_MAX_HEAD_DIM}"
    if shape["block_size"] < 16 or shape["block_size"] & (shape["block_size"] - 1):
        return f"block_size={shape['block_size']} is no power of two from 16 on"
    return refuses_special_scores(query) or refuses_storage(query)


def _refuses_decode(query: OpQuery) -> str | None:
    if query.shape["num_heads"] == query.shape["num_kv_heads"]:
        return f"one query head a KV head: Gluon's. {refuses_packed(query) or 'A packed cache'}"
    return _refuses_sizes(query)


refuses_decode = requires(UNIFIED_ATTENTION, also=_refuses_decode)
refuses_prefill = requires(UNIFIED_ATTENTION, FLASH_ATTENTION, also=_refuses_sizes)


def paged_attention_packed(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over a packed pool -> [T, heads, d].

    Batches of one query a sequence use the Gluon kernel. So do those of few queries, one by one,
    unless there are enough sequences for a kernel that does not split contexts.
    """
    length = metadata.max_seqlen_q
    programs = len(metadata.query_lens_cpu) * kv_cache.key.shape[2]
    if length == 1 or (length <= _GLUON_QUERIES and programs < _PROGRAMS):
        return _gluon(q, kv_cache, metadata, scale, sliding_window)
    return _in_place(_PACKED, q, kv_cache, metadata, scale, sliding_window)


def _prefill(
    layout: CacheLayout,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over the pool -> [T, heads, d]."""
    lens = metadata.context_lens_cpu
    few = lens is not None and sum(lens) <= _MOST_CONTEXT_A_QUERY * q.shape[0]
    attend = _gathered if few else _in_place
    return attend(layout, q, kv_cache, metadata, scale, sliding_window)


def _in_place(
    layout: CacheLayout,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over the pool -> [T, heads, d].

    A window of W tokens includes the query's own, so it is W - 1 tokens to the left. Assumes that
    FP8 keys and values are multiplied by the descales. The kernel cannot be told of
    `padding_lens`: it reads these slots, with a weight of 0.
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    lens = metadata.max_seqlen_q, metadata.context_lens, metadata.max_context_len
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    scales = None, kv_cache.key_scale, kv_cache.value_scale
    where = metadata.cu_seqlens_q, *lens, scale, True, window, metadata.block_tables
    pools = layout.pools(kv_cache)
    function(UNIFIED_ATTENTION)(
        q, *pools, out, *where, 0.0, *scales, shuffled_kv_cache=layout.is_packed
    )
    return out


def _gluon(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over a packed pool -> [T, heads, d].

    One query at a time: with several, persistent programs (`ps`) skip keys where a split falls
    within a partition. Assumes that FP8 keys and values work with 16-bit queries.
    """
    assert sliding_window is None, "refuses_packed keeps windows away"
    q = q.contiguous()
    out = torch.empty_like(q)
    rows = equal_queries(metadata, 1)
    function(GLUON_DECODE)(
        out,
        q,
        *_PACKED.pools(kv_cache),
        rows.context_lens,
        rows.block_tables,
        scale,
        rows.length,
        _PARTITIONS,
        context_partition_size=_PARTITION,
        compute_type=q.dtype,
        key_scale=kv_cache.key_scale,
        value_scale=kv_cache.value_scale,
        ps=True,
    )
    return out


def _gathered(
    layout: CacheLayout,
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over its keys and values, gathered from the pool.

    Assumes that the causal mask aligns the last query with the last key.

    Raises:
        ValueError: when the context lengths are unknown on the host.
    """
    lens = known_context_lens(metadata)
    tokens = context_tokens(metadata, kv_cache.block_size)
    key, value = layout.rows(kv_cache, tokens.slots, q.dtype)
    out: torch.Tensor = function(FLASH_ATTENTION)(
        q.contiguous(),
        key,
        value,
        metadata.cu_seqlens_q,
        tokens.starts,
        metadata.max_seqlen_q,
        max(lens),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1, 0) if sliding_window is None else (sliding_window - 1, 0, 0),
    )
    return out


paged_attention = partial(_in_place, _PLAIN)
prefill_attention = partial(_prefill, _PLAIN)
prefill_attention_packed = partial(_prefill, _PACKED)


def known_context_lens(metadata: AttentionMetadata) -> tuple[int, ...]:
    """The context lengths on the host.

    Raises:
        ValueError: when they are unknown on the host, as inside a graph.
    """
    if metadata.context_lens_cpu is None:
        raise ValueError(
            "prefill gathers keys and values, for which the host must know the context lengths; "
            "graphs and drafts' single steps, where it does not, are for decoding"
        )
    return metadata.context_lens_cpu
