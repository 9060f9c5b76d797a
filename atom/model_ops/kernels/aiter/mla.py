"""Multi-head latent attention with aiter.

Decode is absorbed: queries are projected into the latent space, and the assembly kernel reads one
latent per token for all heads. Prefill is expanded: keys and values are built once and passed to
flash attention. See `kernels.torch.mla`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from atom.model_ops.kernels.aiter.attention import known_context_lens
from atom.model_ops.kernels.aiter.layout import FLASH_ATTENTION
from atom.model_ops.kernels.aiter.sequences import context_tokens, equal_queries, token_starts
from atom.model_ops.kernels.aiter.splits import SPLITS
from atom.model_ops.kernels.aiter.support import (
    ARCH,
    COMPUTE_UNITS,
    refuses_storage,
    requires,
)
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.kernels.torch.fp8 import bits, dequantise
from atom.model_ops.kernels.triton.list_slots import list_slots
from atom.model_ops.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.registry import OpQuery

_DECODE = EntryPoint(
    "aiter.mla:mla_decode_fwd",
    "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q",
    "page_size nhead_kv sm_scale num_kv_splits num_kv_splits_indptr",
)
# Head counts that the decode kernels are compiled for (bfloat16, without persistent work lists).
# Fewer heads are padded, which costs little: the latents are read once for all heads.
_HEADS = (16, 32, 64, 128)
# gfx942 lacks the kernel for these and one query.
_NOT_ON_GFX942 = 64
_RANK, _ROPE = 512, 64
# Maximum queries per sequence of one kernel call.
_QUERIES = 4
_MAX_V_HEAD_DIM = 256


@dataclass(frozen=True)
class _Pages:
    """The decode kernel's page arguments for N sequences; a page is one token.

    Attributes:
        queries: per sequence.
        query_starts, starts: [N + 1] int32, offsets of each sequence's queries and pages.
        indices: [C] int32, each page's slot; C may be more than there are pages.
        last_lens: [N] int32, tokens of the last page.
    """

    queries: int
    query_starts: torch.Tensor
    starts: torch.Tensor
    indices: torch.Tensor
    last_lens: torch.Tensor


def _refuses_latents(query: OpQuery) -> str | None:
    shape = query.shape
    if (shape["kv_lora_rank"], shape["qk_rope_head_dim"]) != (_RANK, _ROPE):
        given = f"{shape['kv_lora_rank']} + {shape['qk_rope_head_dim']}"
        return f"latents have {_RANK} + {_ROPE} elements, not {given}"
    if shape["num_heads"] > _HEADS[-1]:
        return f"num_heads={shape['num_heads']} is above {_HEADS[-1]}"
    if query.storage != query.dtype:
        return "reads an 8-bit cache with 8-bit queries only"
    return None


def _refuses_values(query: OpQuery) -> str | None:
    if query.shape["v_head_dim"] > _MAX_V_HEAD_DIM:
        return f"v_head_dim={query.shape['v_head_dim']} is above {_MAX_V_HEAD_DIM}"
    return refuses_storage(query)


refuses_decode = requires(
    _DECODE, ARCH, COMPUTE_UNITS, also=_refuses_latents, dtypes=(torch.bfloat16,)
)
refuses_prefill = requires(FLASH_ATTENTION, also=_refuses_values)


def padded_heads(num_heads: int, queries: int) -> int:
    """The smallest number of heads, at least `num_heads`, with a kernel for so many queries."""
    missing = _NOT_ON_GFX942 if function(ARCH)() == "gfx942" and queries == 1 else None
    there = (heads for heads in _HEADS if heads != missing)
    return next(heads for heads in there if heads >= num_heads)


def mla_decode(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    The kernel needs equal query lengths; otherwise each query is passed as a sequence of its own. A
    page is one token, so `kv_indices` are slots. Assumes that several queries of a sequence are
    masked causally, and that `kv_indices` is not read beyond the last of `kv_indptr`.

    The split table is passed, since aiter would take it from a cache of 128 device tensors: graphs
    that were captured with one would read freed memory once it is evicted.
    """
    pages = metadata.derive(
        ("latent pages", kv_cache.block_size), lambda: _pages(metadata, kv_cache.block_size)
    )
    padded = padded_heads(up_proj.shape[0], pages.queries)
    carried = _absorb(q, up_proj, kv_cache.latent.shape[2], padded)
    splits, split_table = SPLITS.table(
        len(pages.last_lens), metadata.max_context_len, function(COMPUTE_UNITS)(), q.device
    )
    out = q.new_empty(q.shape[0], carried.shape[1], up_proj.shape[2])
    function(_DECODE)(
        carried,
        kv_cache.latent.view(-1, 1, 1, carried.shape[2]),
        out,
        pages.query_starts,
        pages.starts,
        pages.indices,
        pages.last_lens,
        pages.queries,
        page_size=1,
        nhead_kv=1,
        sm_scale=scale,
        num_kv_splits=splits,
        num_kv_splits_indptr=split_table,
    )
    return _leave_latent_space(out, up_proj, q.shape[2] - _rope_dim(kv_cache, up_proj))


def mla_prefill(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    Assumes that values may be narrower than keys.

    Raises:
        ValueError: when the context lengths are unknown on the host.
    """
    lens = known_context_lens(metadata)
    tokens = context_tokens(metadata, kv_cache.block_size)
    key, value = _expand(_latents(kv_cache, tokens.slots, q.dtype), q, up_proj)
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
    )
    return out


def _pages(metadata: AttentionMetadata, block_size: int) -> _Pages:
    queries = equal_queries(metadata, _QUERIES)
    lens, count = metadata.context_lens_cpu, len(queries.context_lens)
    is_whole = queries.context_lens is metadata.context_lens
    most = metadata.max_context_len
    bound = sum(lens) if lens is not None and is_whole else count * most
    starts = token_starts(queries.context_lens)
    # A query of its own sees no padding behind it.
    padding = metadata.padding_lens if is_whole else None
    tables = queries.block_tables, queries.context_lens
    device = starts.device
    return _Pages(
        queries.length,
        torch.arange(count + 1, dtype=torch.int32, device=device) * queries.length,
        starts,
        list_slots(*tables, starts, block_size, most, bound, padding),
        torch.ones(count, dtype=torch.int32, device=device),
    )


def _rope_dim(kv_cache: LatentCacheTensor, up_proj: torch.Tensor) -> int:
    return kv_cache.latent.shape[2] - up_proj.shape[2]


def _absorb(q: torch.Tensor, up_proj: torch.Tensor, latent_dim: int, padded: int) -> torch.Tensor:
    """q [T, heads, nope + rope] -> [T, padded, rank + rope]."""
    heads, _, rank = up_proj.shape
    nope = q.shape[2] - (latent_dim - rank)
    carried = q.new_zeros(q.shape[0], padded, latent_dim)
    by_head = torch.bmm(q[..., :nope].transpose(0, 1), up_proj[:, :nope])
    carried[:, :heads, :rank] = by_head.transpose(0, 1)
    carried[:, :heads, rank:] = q[..., nope:]
    return carried


def _leave_latent_space(out: torch.Tensor, up_proj: torch.Tensor, nope: int) -> torch.Tensor:
    """out [T, padded heads, rank] -> [T, heads, v]."""
    seen = out[:, : up_proj.shape[0]].transpose(0, 1)
    return torch.bmm(seen, up_proj[:, nope:].transpose(1, 2)).transpose(0, 1)


def _latents(kv_cache: LatentCacheTensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[C, rank + rope] of `slots`."""
    latent = bits(kv_cache.latent).flatten(0, 1)[slots].view(kv_cache.latent.dtype)
    return latent if kv_cache.scale is None else dequantise(latent, kv_cache.scale, dtype)


def _expand(
    latents: torch.Tensor, q: torch.Tensor, up_proj: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """latents [C, rank + rope] -> keys [C, heads, nope + rope], values [C, heads, v]."""
    heads, rows, rank = up_proj.shape
    nope = q.shape[2] - (latents.shape[1] - rank)
    both = F.linear(latents[:, :rank], up_proj.reshape(heads * rows, rank))
    built, value = torch.split_with_sizes(both.view(-1, heads, rows), [nope, rows - nope], dim=2)
    shared = latents[:, None, rank:].expand(-1, heads, -1)
    return torch.cat((built, shared), dim=2), value.contiguous()
