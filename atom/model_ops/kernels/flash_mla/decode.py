"""Latent attention for a few queries per sequence with FlashMLA, on Hopper GPUs.

Queries are projected into the latent space, and the kernel reads each cached latent once, as key
and as value of all heads of all queries of a sequence. It cannot be told of `padding_lens`: it
reads these slots, with a weight of 0. See `kernels.torch.mla`.

How it splits contexts over the device is a plan, which a kernel of its own makes from the context
lengths, on the device, in the first call that is given an empty plan. So a captured graph plans in
each replay, and nobody on the host need know the lengths. That is why it is this library: the
planning of FlashInfer's `BatchMLAPagedAttentionWrapper` runs on the host, on lengths copied there.

Source: github.com/deepseek-ai/FlashMLA, `flash_mla_with_kvcache`.
"""

from __future__ import annotations

import torch

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.registry import OpQuery

# Earlier releases make a plan of lengths and sizes, and are refused for that.
_PLAN = EntryPoint("flash_mla:get_mla_metadata", "")
_DECODE = EntryPoint(
    "flash_mla:flash_mla_with_kvcache",
    "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata",
    "softmax_scale causal",
)

_ARCH = "sm90"
_RANK, _ROPE = 512, 64
_BLOCK_SIZE = 64


def refuses(query: OpQuery) -> str | None:
    """Why FlashMLA cannot run; None if it can."""
    platform, shape = query.platform, query.shape
    if platform.arch != _ARCH:
        return f"dense decode is compiled for {_ARCH}, this is {platform.arch}"
    if (reason := probe.refusal(_PLAN, _DECODE)) is not None:
        return reason
    if query.dtype != torch.bfloat16 and query.dtype not in probe.extra_dtypes():
        return f"computes in bfloat16, not {_short(query.dtype)}"
    if query.storage != query.dtype:
        return f"reads a cache in {_short(query.dtype)}, not {_short(query.storage)}"
    if (shape["kv_lora_rank"], shape["qk_rope_head_dim"]) != (_RANK, _ROPE):
        given = f"{shape['kv_lora_rank']} + {shape['qk_rope_head_dim']}"
        return f"latents have {_RANK} + {_ROPE} elements, not {given}"
    if shape["block_size"] != _BLOCK_SIZE:
        return f"reads blocks of {_BLOCK_SIZE}, not block_size={shape['block_size']}"
    return None


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def mla_decode(
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    No host sync. The kernel needs equal query lengths: shorter sequences get queries before their
    own, of which nothing is kept. Assumes that the last query is at the end of the context, and
    that a query before the context's first token does no harm.

    All layers of a pass with as many heads share a plan: it is of the lengths.
    """
    heads, up_rows, rank = up_proj.shape
    nope = q.shape[2] - _ROPE
    wide = _absorb(q, up_proj[:, :nope])
    if metadata.is_ragged:
        rows, places = metadata.derive("padded queries", lambda: _pad_queries(metadata))
        wide = wide[rows]
    plan = metadata.derive(("FlashMLA's plan", heads), lambda: function(_PLAN)()[0])
    seen, _ = function(_DECODE)(
        wide.view(-1, metadata.max_seqlen_q, heads, wide.shape[2]),
        kv_cache.latent[:, :, None],
        metadata.block_tables,
        metadata.context_lens,
        rank,
        plan,
        softmax_scale=scale,
        causal=True,
    )
    seen = seen.flatten(0, 1)
    if metadata.is_ragged:
        seen = seen[places]
    out = q.new_empty(q.shape[0], heads, up_rows - nope)
    w_uv = up_proj[:, nope:].transpose(1, 2)
    torch.bmm(seen.transpose(0, 1), w_uv, out=out.transpose(0, 1))
    return out


def _absorb(q: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """q [T, heads, nope + rope], w_uk [heads, nope, rank] -> [T, heads, rank + rope]."""
    heads, nope, rank = w_uk.shape
    wide = q.new_empty(q.shape[0], heads, rank + _ROPE)
    torch.bmm(q[..., :nope].transpose(0, 1), w_uk, out=wide[..., :rank].transpose(0, 1))
    wide[..., rank:] = q[..., nope:]
    return wide


def _pad_queries(metadata: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """The token [B * n] of each of n queries per sequence, n being the largest query length, and
    where each token [T] is among them. A sequence's own come last, behind any others.
    """
    starts, length = metadata.cu_seqlens_q, metadata.max_seqlen_q
    total, device = sum(metadata.query_lens_cpu), metadata.cu_seqlens_q.device
    ends = starts[1:].long()
    before = torch.arange(length, device=device) - length
    rows = (ends[:, None] + before).clamp_(min=0).flatten()
    sequences = torch.arange(len(ends), device=device)
    owners = torch.repeat_interleave(sequences, starts[1:] - starts[:-1], output_size=total)
    places = (owners + 1) * length - (ends[owners] - torch.arange(total, device=device))
    return rows, places
