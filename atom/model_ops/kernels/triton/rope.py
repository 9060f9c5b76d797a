"""Rotary position embedding of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements per program: several heads, so that cosines and sines are loaded once for all of them.
_TILE = 1024


@triton.jit
def load_angles(cos_sin_ptr, position, table_rows, ROTARY: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines [1, HALF]; NaN for a position outside the table, which is not read then."""
    pairs = tl.arange(0, HALF)[None, :]
    known = (pairs < ROTARY // 2) & (position >= 0) & (position < table_rows)
    angles = cos_sin_ptr + position * ROTARY + pairs
    cos = tl.load(angles, mask=known, other=float("nan"))
    sin = tl.load(angles + ROTARY // 2, mask=known, other=float("nan"))
    return cos, sin


@triton.jit
def rotated(x_heads, pairs, mask, cos, sin, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The halves of heads at pointers [N, 1], rotated: two of [N, HALF] float32."""
    if INTERLEAVED:
        first = tl.load(x_heads + 2 * pairs, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_heads + 2 * pairs + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(x_heads + pairs, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_heads + ROTARY // 2 + pairs, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rotate_heads(
    x_ptr,
    out_ptr,
    token,
    heads,
    num_heads,
    token_stride,
    head_stride,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    pairs = tl.arange(0, HALF)[None, :]
    is_head = heads[:, None] < num_heads
    mask = is_head & (pairs < ROTARY // 2)
    x_heads = x_ptr + token * token_stride + heads[:, None] * head_stride
    out_heads = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM
    first, second = rotated(x_heads, pairs, mask, cos, sin, ROTARY, INTERLEAVED)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_heads + pairs, first.to(dtype), mask=mask)
    tl.store(out_heads + ROTARY // 2 + pairs, second.to(dtype), mask=mask)
    if ROTARY < HEAD_DIM:
        dims = ROTARY + tl.arange(0, REST)[None, :]
        mask = is_head & (dims < HEAD_DIM)
        tl.store(out_heads + dims, tl.load(x_heads + dims, mask=mask), mask=mask)


@triton.jit
def _rope(
    positions_ptr,
    q_ptr,
    k_ptr,
    cos_sin_ptr,
    q_out_ptr,
    k_out_ptr,
    table_rows,
    q_heads,
    k_heads,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    q_tiles,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Grid: tokens, tiles of HEADS heads (queries first)."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    cos, sin = load_angles(cos_sin_ptr, position, table_rows, ROTARY, HALF)
    if tile < q_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        rotate_heads(
            q_ptr, q_out_ptr, token, heads, q_heads, q_token_stride, q_head_stride, cos, sin,
            HEAD_DIM, ROTARY, HALF, REST, INTERLEAVED,
        )  # fmt: skip
    else:
        heads = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        rotate_heads(
            k_ptr, k_out_ptr, token, heads, k_heads, k_token_stride, k_head_stride, cos, sin,
            HEAD_DIM, ROTARY, HALF, REST, INTERLEAVED,
        )  # fmt: skip


def rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, heads, d] and k [T, kv_heads, d], d contiguous, in float32.

    Args:
        positions: [T] int64. A position outside the table gives NaN.
        cos_sin: [positions, rotary_dim] float32, cosines then sines; dimensions beyond rotary_dim
            are unchanged.
        interleaved: the input has pairs (x0, x1), (x2, x3), ... instead of halves; the output
            always has halves.

    Raises:
        ValueError: when the shapes do not fit together.
    """
    num_tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    table_rows, rotary_dim = cos_sin.shape
    fits = k.shape == (num_tokens, k_heads, head_dim) and rotary_dim <= head_dim
    if not (fits and positions.shape == (num_tokens,) and cos_sin.is_contiguous()):
        raise ValueError(
            f"rope wants q and k [T, heads, d], positions [T] and a table [positions, at most d]; "
            f"given q {list(q.shape)}, k {list(k.shape)}, positions {list(positions.shape)}, table "
            f"{list(cos_sin.shape)}"
        )
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens == 0:
        return q_out, k_out
    q = q if q.stride(2) == 1 else q.contiguous()
    k = k if k.stride(2) == 1 else k.contiguous()
    half = triton.next_power_of_2(max(rotary_dim // 2, 1))
    heads = min(triton.next_power_of_2(max(q_heads, k_heads)), max(_TILE // (2 * half), 1))
    q_tiles = triton.cdiv(q_heads, heads)
    _rope[(num_tokens, q_tiles + triton.cdiv(k_heads, heads))](
        positions,
        q,
        k,
        cos_sin,
        q_out,
        k_out,
        table_rows,
        q_heads,
        k_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        q_tiles,
        HEAD_DIM=head_dim,
        ROTARY=rotary_dim,
        HALF=half,
        REST=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        HEADS=heads,
        INTERLEAVED=interleaved,
        num_warps=4,
    )
    return q_out, k_out
