"""Multi-head latent attention in plain torch.

The cache has one latent vector and one rotated key part per token, shared by all heads. `up_proj`
[heads, nope + v, rank] expands a latent into each head's key and value. There are two equivalent
computations: with few queries these are projected into the latent space ("absorbed", no key or
value is built); with many it is cheaper to build keys and values once ("expanded").

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.torch.elementwise import Rope
from atom.model_ops.kernels.torch.paged import (
    attention_mask,
    by_query_length,
    compute_dtype,
    gather_blocks,
    longest_context,
    write_rows,
)

# Ops that others are given, with what they take by position.
LatentWrite = Callable[[torch.Tensor, torch.Tensor, LatentCacheTensor, torch.Tensor], None]
Decode = Callable[
    [torch.Tensor, LatentCacheTensor, torch.Tensor, AttentionMetadata, float], torch.Tensor
]


class RotateAndWrite(Protocol):
    """The op `mla_rope_and_cache` with its parts."""

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool,
        kv_cache: LatentCacheTensor,
        slot_mapping: torch.Tensor,
        /,
    ) -> torch.Tensor: ...


def mla_write_and_decode(
    positions: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    rotate_and_write: RotateAndWrite,
    decode: Decode,
) -> torch.Tensor:
    """`mla_rope_and_cache` of the new tokens, then `mla_decode` -> [T, heads, v].

    Args:
        q: [T, heads, nope + rope], not rotated.
        rotate_and_write, decode: the ops for this cache.
    """
    slots = metadata.slot_mapping
    rows = rotate_and_write(positions, q, latent, k_rope, cos_sin, interleaved, kv_cache, slots)
    return decode(rows, kv_cache, up_proj, metadata, scale)


def mla_rope_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    kv_cache: LatentCacheTensor,
    slot_mapping: torch.Tensor,
    rope: Rope,
    write: LatentWrite,
) -> torch.Tensor:
    """Rotate the last columns of q [T, heads, nope + rope], and k_rope [T, rope]; write latent
    [T, rank] and k_rope to their slots -> q.

    Args:
        cos_sin, interleaved: as of `rope`, all columns of k_rope being rotated.
        rope, write: the ops `rope` and `mla_cache_write` for this cache.
    """
    nope = q.shape[2] - k_rope.shape[1]
    q_rope, key = rope(positions, q[..., nope:], k_rope[:, None], cos_sin, interleaved)
    write(latent, key[:, 0], kv_cache, slot_mapping)
    return torch.cat((q[..., :nope], q_rope), dim=-1) if nope else q_rope


def mla_cache_write(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: LatentCacheTensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write latent [T, rank] and k_rope [T, rope] to their slots; slot -1 is skipped."""
    rows = torch.cat((latent, k_rope), dim=-1)
    write_rows(slot_mapping, (kv_cache.latent, rows, kv_cache.scale))


def _attend(
    causal: bool,
    q: torch.Tensor,
    kv_cache: LatentCacheTensor,
    up_proj: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attention of q [T, heads, nope + rope] over the latent cache -> [T, heads, v].

    The last query of a sequence sits at the last position of its context.

    Args:
        causal: else queries see the keys after them, too.
    """
    heads, _, rank = up_proj.shape
    nope = q.shape[-1] - (kv_cache.latent.shape[-1] - rank)
    dtype = compute_dtype(q)
    dense = up_proj.to(dtype)
    w_uk, w_uv = dense[:, :nope], dense[:, nope:]
    limit = absorb_limit(rank, up_proj.shape[1])
    out = q.new_empty(q.shape[0], heads, w_uv.shape[1])
    for length, rows, tokens in by_query_length(metadata, q.device):
        batch = (q if tokens is None else q[tokens]).view(len(rows), length, heads, -1).to(dtype)
        longest = longest_context(metadata, rows)
        cache = gather_blocks(kv_cache.latent, kv_cache.scale, metadata, rows, longest, dtype)
        mask = attention_mask(metadata, rows, length, longest, causal=causal)
        attend = _absorbed if length <= limit else _expanded
        attended = attend(batch, cache, w_uk, w_uv, mask, scale).flatten(0, 1).to(q.dtype)
        if tokens is None:
            return attended
        out[tokens] = attended
    return out


mla_attention = partial(_attend, True)
mla_block_attention = partial(_attend, False)


def absorb_limit(rank: int, up_rows: int) -> float:
    """The most queries per sequence for which absorbing takes fewer operations.

    Per head and cached token, building a key and a value costs `rank * up_rows`; each query then
    saves `2 * rank - up_rows` compared with the latent space. `up_rows` is nope + v.
    """
    saved = 2 * rank - up_rows
    return rank * up_rows / saved if saved > 0 else float("inf")


def _absorbed(
    q: torch.Tensor,
    cache: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """q [b, L, heads, nope + rope], cache [b, C, rank + rope] -> [b, L, heads, v]."""
    num_seqs, length, heads, _ = q.shape
    nope, rank = w_uk.shape[1:]
    q_nope, q_rope = q[..., :nope], q[..., nope:]
    # One product per head; then all heads are queries of the one shared key.
    carried = torch.matmul(q_nope.permute(2, 0, 1, 3).flatten(1, 2), w_uk)
    carried = carried.view(heads, num_seqs, length, rank).permute(1, 0, 2, 3)
    wide = torch.cat((carried, q_rope.transpose(1, 2)), dim=-1).flatten(1, 2)[:, None]
    if mask is not None:
        mask = mask[:, None].expand(-1, heads, length, -1).flatten(1, 2)[:, None]
    shared = cache[:, None]
    # Values are the first `rank` columns of the keys; padding to equal widths avoids a copy.
    seen = F.scaled_dot_product_attention(wide, shared, shared, attn_mask=mask, scale=scale)
    seen = seen[..., :rank].reshape(num_seqs, heads, length, rank).transpose(0, 1).flatten(1, 2)
    out = torch.matmul(seen, w_uv.transpose(1, 2))
    return out.view(heads, num_seqs, length, -1).permute(1, 2, 0, 3)


def _expanded(
    q: torch.Tensor,
    cache: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """q [b, L, heads, nope + rope], cache [b, C, rank + rope] -> [b, L, heads, v]."""
    (heads, _, rank), v_dim = w_uk.shape, w_uv.shape[1]
    latent, k_rope = cache[..., :rank], cache[..., rank:]
    key = torch.einsum("bcr,hnr->bhcn", latent, w_uk)
    key = torch.cat((key, k_rope[:, None].expand(-1, heads, -1, -1)), dim=-1)
    value = torch.einsum("bcr,hvr->bhcv", latent, w_uv)
    # With equal widths SDPA need not materialise the matrix of scores.
    value = F.pad(value, (0, max(key.shape[-1] - v_dim, 0)))
    if mask is not None:
        mask = mask[:, None]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), key, value, attn_mask=mask, scale=scale)
    return out[..., :v_dim].transpose(1, 2)
