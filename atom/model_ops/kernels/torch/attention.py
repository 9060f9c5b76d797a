"""Paged attention in plain torch: gathers each sequence's blocks, then calls SDPA."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.torch.paged import (
    attention_mask,
    by_query_length,
    compute_dtype,
    gather_blocks,
    longest_context,
    write_rows,
)

# Cap of the scores, and sinks.
_Special = tuple[float | None, torch.Tensor | None]


def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [T, kv_heads, d] to their slots; slot -1 is skipped."""
    write_rows(
        slot_mapping,
        (kv_cache.key, k, kv_cache.key_scale),
        (kv_cache.value, v, kv_cache.value_scale),
    )


def _attend_all(
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

    The last query of a sequence sits at the last position of its context.

    Args:
        causal: else queries see the keys after them, too: a sequence's queries, its last tokens,
            see each other and all of its context, or what a window leaves of it.
        softcap: scaled scores s become softcap * tanh(s / softcap).
        sinks: [heads] float32, a score more in each head's softmax, whose value is 0.
    """
    special = softcap, sinks
    out = torch.empty_like(q)
    for length, rows, tokens in by_query_length(metadata, q.device):
        batch = (q if tokens is None else q[tokens]).view(len(rows), length, *q.shape[1:])
        attended = _attend(batch, kv_cache, metadata, rows, scale, sliding_window, special, causal)
        attended = attended.flatten(0, 1)
        if tokens is None:
            return attended
        out[tokens] = attended
    return out


paged_attention = partial(_attend_all, True)
block_attention = partial(_attend_all, False)


def _attend(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    rows: list[int],
    scale: float,
    sliding_window: int | None,
    special: _Special,
    causal: bool,
) -> torch.Tensor:
    """q [b, L, heads, d] of sequences `rows`, all with L queries."""
    num_seqs, length, heads, head_dim = q.shape
    kv_heads = kv_cache.key.shape[2]
    group = heads // kv_heads
    longest = longest_context(metadata, rows)
    dtype = compute_dtype(q)
    visible = None if sliding_window is None else sliding_window + length - 1
    where = metadata, rows, longest, dtype, visible
    key = gather_blocks(kv_cache.key, kv_cache.key_scale, *where).transpose(1, 2)
    value = gather_blocks(kv_cache.value, kv_cache.value_scale, *where).transpose(1, 2)
    # The query heads of one KV head become extra queries, so K and V need not be repeated.
    grouped = q.view(num_seqs, length, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_seqs, kv_heads, group * length, head_dim).to(dtype)
    mask = attention_mask(metadata, rows, length, longest, sliding_window, causal)
    if mask is not None:
        mask = mask[:, None, None].expand(num_seqs, 1, group, length, longest)
        mask = mask.reshape(num_seqs, 1, group * length, longest)
    if special == (None, None):
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        out = _attend_specially(grouped, key, value, mask, scale, *special)
    out = out.view(num_seqs, kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_seqs, length, heads, head_dim).to(q.dtype)


def _attend_specially(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [b, kv_heads, group * L, d] over keys and values [b, kv_heads, n, d], by definition."""
    scores = (q @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        num_seqs, kv_heads, rows, _ = scores.shape
        of_heads = sinks.view(kv_heads, -1).repeat_interleave(
            rows * kv_heads // sinks.numel(), dim=1
        )
        column = of_heads[None, :, :, None].expand(num_seqs, -1, -1, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value
