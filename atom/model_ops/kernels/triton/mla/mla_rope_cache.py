"""Rotates the rotary parts of queries and of the shared key, and writes the latent cache, in one
launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import LatentCacheTensor
from atom.model_ops.kernels.torch.elementwise import Rope
from atom.model_ops.kernels.torch.mla import LatentWrite
from atom.model_ops.kernels.triton.attention.flash import describe
from atom.model_ops.kernels.triton.attention.rope_cache import store_rounded
from atom.model_ops.kernels.triton.rope import load_angles, rotated
from atom.model_ops.kernels.triton.support import refuses_parts, refuses_storage
from atom.model_ops.registry import OpQuery

# Elements per program: several heads, so that angles are loaded once for all of them.
_TILE = 2048


def refuses(query: OpQuery) -> str | None:
    """Why one kernel cannot do both; None if it can."""
    return refuses_parts("rope", "mla_cache_write") or refuses_storage(query)


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

    Rounded to the type of q, then as the cache stores it. A position outside the table gives NaN;
    slot -1 is skipped.

    Args:
        cos_sin, interleaved: as of `rope`, all columns of k_rope being rotated.
        rope, write: not called.

    Raises:
        ValueError: when the tensors do not fit together.
    """
    del rope, write
    pool, slots = kv_cache.latent, slot_mapping
    num_tokens, num_heads, width = q.shape
    rank, rope_dim = latent.shape[1], k_rope.shape[1]
    if (
        not len(latent) == len(k_rope) == len(positions) == len(slots) == num_tokens
        or width < rope_dim
        or cos_sin.shape[1] != rope_dim
        or not cos_sin.is_contiguous()
        or pool.shape[2] != rank + rope_dim
        or pool.stride(2) != 1
    ):
        raise ValueError(
            f"mla_rope_and_cache wants q [T, heads, nope + rope], latent [T, rank], k_rope "
            f"[T, rope], a position and a slot for each token, a table [positions, rope], and a "
            f"cache [blocks, block_size, rank + rope]; given q {describe(q)}, latent "
            f"{describe(latent)}, k_rope {describe(k_rope)}, table {describe(cos_sin)}, cache "
            f"{describe(pool)}, {len(positions)} positions and {len(slots)} slots"
        )
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    q, latent, k_rope = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, latent, k_rope))
    padded = triton.next_power_of_2(width)
    heads = min(triton.next_power_of_2(num_heads), max(_TILE // padded, 1))
    q_tiles = triton.cdiv(num_heads, heads)
    nope = width - rope_dim
    _mla_rope_and_cache[(num_tokens, q_tiles + 1)](
        positions, q, latent, k_rope, cos_sin, q_out, pool, kv_cache.scale, slots,
        cos_sin.shape[0], num_heads, q_tiles,
        q.stride(0), q.stride(1), latent.stride(0), k_rope.stride(0),
        pool.stride(0), pool.stride(1),
        NOPE=nope, NOPE_PADDED=triton.next_power_of_2(max(nope, 1)),
        ROPE=rope_dim, HALF=triton.next_power_of_2(max(rope_dim // 2, 1)),
        RANK=rank, RANK_PADDED=triton.next_power_of_2(rank),
        HEADS=heads, INTERLEAVED=interleaved, BLOCK_SIZE=kv_cache.block_size,
        LARGEST=0.0 if kv_cache.scale is None else torch.finfo(pool.dtype).max, num_warps=4,
    )  # fmt: skip
    return q_out


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _mla_rope_and_cache(
    positions_ptr,
    q_ptr,
    latent_ptr,
    rope_ptr,
    cos_sin_ptr,
    q_out_ptr,
    pool_ptr,
    scale_ptr,
    slots_ptr,
    table_rows,
    num_heads,
    q_tiles,
    q_token_stride,
    q_head_stride,
    latent_stride,
    rope_stride,
    block_stride,
    token_stride,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Grid: tokens, tiles of HEADS heads and, last, what is cached."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos, sin = load_angles(cos_sin_ptr, tl.load(positions_ptr + token), table_rows, ROPE, HALF)
    pairs = tl.arange(0, HALF)[None, :]
    dtype: tl.constexpr = q_out_ptr.dtype.element_ty
    if tile < q_tiles:
        heads = (tile * HEADS + tl.arange(0, HEADS))[:, None]
        is_head = heads < num_heads
        q_heads = q_ptr + token * q_token_stride + heads * q_head_stride
        out_heads = q_out_ptr + (token * num_heads + heads) * (NOPE + ROPE)
        if NOPE:
            dims = tl.arange(0, NOPE_PADDED)[None, :]
            mask = is_head & (dims < NOPE)
            tl.store(out_heads + dims, tl.load(q_heads + dims, mask=mask), mask=mask)
        mask = is_head & (pairs < ROPE // 2)
        first, second = rotated(q_heads + NOPE, pairs, mask, cos, sin, ROPE, INTERLEAVED)
        tl.store(out_heads + NOPE + pairs, first.to(dtype), mask=mask)
        tl.store(out_heads + NOPE + ROPE // 2 + pairs, second.to(dtype), mask=mask)
        return
    slot = tl.load(slots_ptr + token).to(tl.int64)
    stored: tl.constexpr = pool_ptr.dtype.element_ty
    pool_ptr += slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    ranks = tl.arange(0, RANK_PADDED)
    mask = (slot >= 0) & (ranks < RANK)
    latent = tl.load(latent_ptr + token * latent_stride + ranks, mask=mask, other=0.0)
    store_rounded(pool_ptr + ranks, latent, mask, scale_ptr, dtype, stored, LARGEST)
    mask = (slot >= 0) & (pairs < ROPE // 2)
    key = rope_ptr + token * rope_stride + tl.zeros([1, 1], tl.int64)
    first, second = rotated(key, pairs, mask, cos, sin, ROPE, INTERLEAVED)
    pool_ptr += RANK
    store_rounded(pool_ptr + pairs, first, mask, scale_ptr, dtype, stored, LARGEST)
    store_rounded(pool_ptr + ROPE // 2 + pairs, second, mask, scale_ptr, dtype, stored, LARGEST)
