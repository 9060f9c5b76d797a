"""Attention over a paged KV cache by aiter: decode, verify and prefill.

Unified attention reads either layout of a pool in place, any mix of query lengths. Layers with
one query head a KV head (an Eagle3 draft's) decode through the Gluon kernel, which wants a packed
pool; see `layout`. Where most tokens are new, flash attention gets keys and values copied out of
the pool. aiter's assembly `pa_*` kernels are called for nothing: they read 16 bits of a block id,
so pools of more than 65,535 blocks would give wrong tokens without a word.
"""

from __future__ import annotations

import torch

from atom.model_ops.kernels.aiter import probe
from atom.model_ops.kernels.aiter.layout import (
    CacheLayout,
    PackedLayout,
    PlainLayout,
    refuses_packing,
)
from atom.model_ops.kernels.aiter.sequences import context_tokens
from atom.model_ops.kernels.aiter.support import refuses_storage
from atom.model_ops.kernels.torch.attention import PagedAttentionOp
from atom.model_ops.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.registry import OpQuery

# Queries a sequence that the Gluon kernel takes.
_GLUON_QUERIES = 4
# Tokens of the context that one step of the Gluon kernel reads, and how many programs share a
# sequence's context at most.
_PARTITION = 256
_MAX_PARTITIONS = 16
# Programs that fill the device: two for each of the 304 compute units of the largest.
_PROGRAMS = 608
_MAX_HEAD_DIM = 256
# Beyond so many cached tokens for each new one, copying them out costs more than it saves.
_MOST_CONTEXT_A_QUERY = 2


def refuses_plain(query: OpQuery) -> str | None:
    """What aiter's unified attention does not take."""
    shape = query.shape
    if shape["head_dim"] > _MAX_HEAD_DIM:
        return f"head_dim={shape['head_dim']} is above {_MAX_HEAD_DIM}"
    if shape["block_size"] < 16 or shape["block_size"] & (shape["block_size"] - 1):
        return f"block_size={shape['block_size']} is no power of two from 16 on"
    return refuses_storage(query)


def refuses_plain_decode(query: OpQuery) -> str | None:
    if query.shape["num_heads"] == query.shape["num_kv_heads"]:
        return f"one query head a KV head: Gluon's. {refuses_packing(query) or 'A packed cache'}"
    return refuses_plain(query)


def load_plain_decode() -> PagedAttentionOp:
    return _load_in_place(PlainLayout())


def load_packed_decode() -> PagedAttentionOp:
    """At most four queries of every sequence, and of all equally many, are Gluon's."""
    gluon = _load_gluon()
    in_place = _load_in_place(PackedLayout())

    def paged_attention(
        q: torch.Tensor,
        kv_cache: KVCacheTensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, d] over a packed pool -> [T, heads, d]."""
        length = metadata.max_seqlen_q
        equal = all(n == length for n in metadata.query_lens_cpu)
        attend = gluon if equal and length <= _GLUON_QUERIES else in_place
        return attend(q, kv_cache, metadata, scale, sliding_window)

    return paged_attention


def load_plain_prefill() -> PagedAttentionOp:
    return _load_prefill(PlainLayout())


def load_packed_prefill() -> PagedAttentionOp:
    return _load_prefill(PackedLayout())


def _load_prefill(layout: CacheLayout) -> PagedAttentionOp:
    in_place = _load_in_place(layout)
    gathered = _load_gathered(layout)

    def prefill_attention(
        q: torch.Tensor,
        kv_cache: KVCacheTensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, d] over the pool -> [T, heads, d]."""
        lens = metadata.context_lens_cpu
        few = lens is not None and sum(lens) <= _MOST_CONTEXT_A_QUERY * q.shape[0]
        attend = gathered if few else in_place
        return attend(q, kv_cache, metadata, scale, sliding_window)

    return prefill_attention


def _load_in_place(layout: CacheLayout) -> PagedAttentionOp:
    attend = probe.function("unified_attention")

    def paged_attention(
        q: torch.Tensor,
        kv_cache: KVCacheTensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, d] over the pool -> [T, heads, d].

        A window of W tokens, the query's own among them, is W - 1 tokens to the left. Takes for
        granted that 8-bit keys and values are multiplied by the scales given as descales.
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        lens = metadata.max_seqlen_q, metadata.context_lens, metadata.max_context_len
        window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        scales = None, kv_cache.key_scale, kv_cache.value_scale
        where = metadata.cu_seqlens_q, *lens, scale, True, window, metadata.block_tables
        pools = layout.pools(kv_cache)
        attend(q, *pools, out, *where, 0.0, *scales, shuffled_kv_cache=layout.is_packed)
        return out

    return paged_attention


def _load_gluon() -> PagedAttentionOp:
    attend = probe.function("pa_decode_gluon")
    layout = PackedLayout()

    def paged_attention(
        q: torch.Tensor,
        kv_cache: KVCacheTensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, d] over a packed pool -> [T, heads, d].

        Takes for granted that any number of partitions is right where programs take several in
        turn (`ps`), and that 8-bit keys and values go with queries in 16 bits.
        """
        assert sliding_window is None, "refuses_packing keeps windows away"
        q = q.contiguous()
        out = torch.empty_like(q)
        kv_heads = kv_cache.key.shape[2]
        attend(
            out,
            q,
            *layout.pools(kv_cache),
            metadata.context_lens,
            metadata.block_tables,
            scale,
            metadata.max_seqlen_q,
            _partitions(len(metadata.query_lens_cpu) * kv_heads, metadata.max_context_len),
            context_partition_size=_PARTITION,
            compute_type=q.dtype,
            key_scale=kv_cache.key_scale,
            value_scale=kv_cache.value_scale,
            ps=True,
        )
        return out

    return paged_attention


def _load_gathered(layout: CacheLayout) -> PagedAttentionOp:
    attend = probe.function("flash_attn_varlen_func")

    def prefill_attention(
        q: torch.Tensor,
        kv_cache: KVCacheTensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, d] over its keys and values, gathered from the pool.

        Takes for granted that the causal mask ends at the last query and the last key together.

        Raises:
            ValueError: when the host does not know the context lengths.
        """
        lens = known_context_lens(metadata)
        tokens = context_tokens(metadata, kv_cache.block_size)
        key, value = layout.rows(kv_cache, tokens.slots, q.dtype)
        out: torch.Tensor = attend(
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

    return prefill_attention


def known_context_lens(metadata: AttentionMetadata) -> tuple[int, ...]:
    """The context lengths on the host.

    Raises:
        ValueError: when it does not know them, as inside a graph.
    """
    if metadata.context_lens_cpu is None:
        raise ValueError(
            "prefill gathers keys and values, for which the host must know the context lengths; "
            "graphs and drafts' single steps, where it does not, are for decoding"
        )
    return metadata.context_lens_cpu


def _partitions(rows: int, longest: int) -> int:
    """Programs that share one sequence's context: enough to fill the device, none without work."""
    share = -(-_PROGRAMS // rows)
    return max(1, min(share, _MAX_PARTITIONS, -(-longest // _PARTITION)))
