"""Projects queries into the latent space for kernels that attend there, in one launch.

Such a kernel reads, for each head, the projected query and behind it the rotated part. What comes
before it in a decode step, rotation and cache write, can be in the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import LatentCacheTensor
from atom.model_ops.kernels.triton.attention.flash import padded
from atom.model_ops.kernels.triton.attention.rope_cache import store_rounded
from atom.model_ops.kernels.triton.rope import load_angles, rotated

# Columns of the latent per program, and the most tokens: more share the weights that it loads.
_COLUMNS = 128
_MOST_TOKENS = 64


@dataclass(frozen=True)
class NewLatents:
    """What a step adds to the cache, not rotated yet.

    Attributes:
        positions, slots: [T] int64; a position outside the table gives NaN, slot -1 is skipped.
        latent: [T, rank].
        k_rope: [T, rope].
        cos_sin, interleaved: as of `rope`, all columns of k_rope being rotated.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    latent: torch.Tensor
    k_rope: torch.Tensor
    cos_sin: torch.Tensor
    interleaved: bool


def absorb(
    q: torch.Tensor,
    up_proj: torch.Tensor,
    kv_cache: LatentCacheTensor,
    num_heads: int,
    new: NewLatents | None = None,
) -> torch.Tensor:
    """q [T, heads, nope + rope] -> [T, num_heads, rank + rope], zeros for heads that q has not.

    With `new`, queries are rotated, and latents and keys rotated and written, as
    `mla_rope_and_cache` does.

    Args:
        up_proj: [heads, nope + v, rank], rows contiguous.
    """
    tokens, heads, width = q.shape
    pool, rank = kv_cache.latent, up_proj.shape[2]
    rope = pool.shape[2] - rank
    nope = width - rope
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(tokens, num_heads, rank + rope, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    rows = min(padded(tokens), _MOST_TOKENS)
    columns = min(padded(rank), _COLUMNS)
    grid = (triton.cdiv(rank, columns), num_heads + (new is not None), triton.cdiv(tokens, rows))
    _absorb[grid](
        q, up_proj, out, *_arguments(new), pool, kv_cache.scale,
        tokens, heads, num_heads, 0 if new is None else new.cos_sin.shape[0],
        q.stride(0), q.stride(1), up_proj.stride(0), up_proj.stride(1),
        0 if new is None else new.latent.stride(0), 0 if new is None else new.k_rope.stride(0),
        pool.stride(0), pool.stride(1),
        NOPE=nope, NOPE_PADDED=padded(nope), ROPE=rope,
        HALF=triton.next_power_of_2(max(rope // 2, 1)), RANK=rank,
        INTERLEAVED=new is not None and new.interleaved, BLOCK_SIZE=kv_cache.block_size,
        LARGEST=0.0 if kv_cache.scale is None else torch.finfo(pool.dtype).max,
        ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out


def _arguments(new: NewLatents | None) -> tuple[torch.Tensor | None, ...]:
    if new is None:
        return (None,) * 5
    latent, k_rope = (x if x.stride(1) == 1 else x.contiguous() for x in (new.latent, new.k_rope))
    return new.positions, new.slots, latent, k_rope, new.cos_sin


@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def _absorb(
    q_ptr,
    up_ptr,
    out_ptr,
    positions_ptr,
    slots_ptr,
    latent_ptr,
    key_ptr,
    cos_sin_ptr,
    pool_ptr,
    scale_ptr,
    tokens,
    heads,
    num_heads,
    table_rows,
    q_token_stride,
    q_head_stride,
    up_head_stride,
    up_row_stride,
    latent_stride,
    key_stride,
    block_stride,
    token_stride,
    NOPE: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: tiles of columns, heads and, if there is something new, what is cached, tiles of
    tokens. The first tile of columns has the rotated part, too.
    """
    head = tl.program_id(1)
    lanes = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = (lanes < tokens)[:, None]
    token = tl.minimum(lanes, tokens - 1).to(tl.int64)[:, None]
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    pairs = tl.arange(0, HALF)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    has_rope = (tl.program_id(0) == 0) & (pairs < ROPE // 2)
    if positions_ptr is not None:
        cos, sin = load_angles(cos_sin_ptr, tl.load(positions_ptr + token), table_rows, ROPE, HALF)
        if head == num_heads:
            slot = tl.load(slots_ptr + token).to(tl.int64)
            kept = live & (slot >= 0)
            stored: tl.constexpr = pool_ptr.dtype.element_ty
            row_ptr = pool_ptr + slot // BLOCK_SIZE * block_stride
            row_ptr += slot % BLOCK_SIZE * token_stride
            mask = kept & (columns < RANK)
            latent = tl.load(latent_ptr + token * latent_stride + columns, mask=mask, other=0.0)
            store_rounded(row_ptr + columns, latent, mask, scale_ptr, dtype, stored, LARGEST)
            mask = kept & has_rope
            at = key_ptr + token * key_stride
            first, second = rotated(at, pairs, mask, cos, sin, ROPE, INTERLEAVED)
            row_ptr += RANK
            store_rounded(row_ptr + pairs, first, mask, scale_ptr, dtype, stored, LARGEST)
            row_ptr += ROPE // 2
            store_rounded(row_ptr + pairs, second, mask, scale_ptr, dtype, stored, LARGEST)
            return

    out_ptr += (token * num_heads + head) * (RANK + ROPE)
    rest_ptr = out_ptr + RANK + pairs
    mask = live & has_rope
    if head >= heads:
        tl.store(out_ptr + columns, tl.zeros([ROWS, COLUMNS], dtype), mask=live & (columns < RANK))
        tl.store(rest_ptr, tl.zeros([ROWS, HALF], dtype), mask=mask)
        tl.store(rest_ptr + ROPE // 2, tl.zeros([ROWS, HALF], dtype), mask=mask)
        return
    q_ptr += token * q_token_stride + head * q_head_stride
    dims = tl.arange(0, NOPE_PADDED)
    q = tl.load(q_ptr + dims[None, :], mask=dims[None, :] < NOPE, other=0.0)
    up_ptr += head.to(tl.int64) * up_head_stride + dims[:, None] * up_row_stride
    up = tl.load(up_ptr + columns, mask=(dims[:, None] < NOPE) & (columns < RANK), other=0.0)
    carried = tl.dot(q, up, input_precision="ieee")
    tl.store(out_ptr + columns, carried.to(dtype), mask=live & (columns < RANK))
    if positions_ptr is not None:
        first, second = rotated(q_ptr + NOPE, pairs, mask, cos, sin, ROPE, INTERLEAVED)
    else:
        first = tl.load(q_ptr + NOPE + pairs, mask=mask, other=0.0)
        second = tl.load(q_ptr + NOPE + ROPE // 2 + pairs, mask=mask, other=0.0)
    tl.store(rest_ptr, first.to(dtype), mask=mask)
    tl.store(rest_ptr + ROPE // 2, second.to(dtype), mask=mask)
