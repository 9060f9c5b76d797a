"""Writes MLA latents and rotated key parts to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import LatentCacheTensor
from atom.model_ops.kernels.triton.attention.cache_write import quantize
from atom.model_ops.kernels.triton.attention.flash import padded

_TOKENS = 4


def mla_cache_write(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: LatentCacheTensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write latent [T, rank] and k_rope [T, rope] to their slots; slot -1 is skipped.

    With a scale, value / scale is stored, clamped to the finite range and rounded to nearest even.
    """
    pool = kv_cache.latent
    largest = 0.0 if kv_cache.scale is None else torch.finfo(pool.dtype).max
    num_tokens, rank = latent.shape
    rope = k_rope.shape[1]
    _write_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        latent, k_rope, pool, kv_cache.scale, slot_mapping, num_tokens,
        latent.stride(0), latent.stride(1), k_rope.stride(0), k_rope.stride(1),
        pool.stride(0), pool.stride(1),
        RANK=rank, ROPE=rope, RANK_PADDED=padded(rank), ROPE_PADDED=padded(rope),
        BLOCK_SIZE=kv_cache.block_size, LARGEST=largest, TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    latent_ptr,
    rope_ptr,
    pool_ptr,
    scale_ptr,
    slots_ptr,
    num_tokens,
    latent_stride,
    latent_column_stride,
    rope_stride,
    rope_column_stride,
    block_stride,
    token_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: tiles of tokens."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    live = (slots >= 0)[:, None]
    at = slots // BLOCK_SIZE * block_stride + slots % BLOCK_SIZE * token_stride
    ranks, ropes = tl.arange(0, RANK_PADDED), tl.arange(0, ROPE_PADDED)
    latent_mask, rope_mask = live & (ranks < RANK), live & (ropes < ROPE)
    latent = tl.load(
        latent_ptr + tokens[:, None] * latent_stride + ranks * latent_column_stride,
        mask=latent_mask,
    )
    rope = tl.load(
        rope_ptr + tokens[:, None] * rope_stride + ropes * rope_column_stride, mask=rope_mask
    )
    stored: tl.constexpr = pool_ptr.dtype.element_ty
    if scale_ptr is not None:
        latent = quantize(latent, scale_ptr, stored, LARGEST)
        rope = quantize(rope, scale_ptr, stored, LARGEST)
    tl.store(pool_ptr + at[:, None] + ranks, latent.to(stored), mask=latent_mask)
    tl.store(pool_ptr + at[:, None] + RANK + ropes, rope.to(stored), mask=rope_mask)
