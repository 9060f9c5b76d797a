"""Rotates queries and keys, and writes keys and values to the paged cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels import packed_cache
from atom.model_ops.kernels.torch.elementwise import CacheWrite, Rope
from atom.model_ops.kernels.triton.attention.cache_write import quantize
from atom.model_ops.kernels.triton.attention.flash import describe
from atom.model_ops.kernels.triton.rope import load_angles, rotate_heads, rotated
from atom.model_ops.kernels.triton.support import refuses_parts, refuses_storage
from atom.model_ops.registry import OpQuery

# Pairs of elements per program: several heads, so that angles are loaded once for all of them.
_TILE = 512
_VECTOR_BYTES = 16


def refuses(query: OpQuery) -> str | None:
    """Why one kernel cannot do both; None if it can."""
    return refuses_parts("rope", "kv_cache_write") or refuses_storage(query)


def refuses_packed(query: OpQuery) -> str | None:
    """The same for a packed cache."""
    return packed_cache.refuses_packed(query) or refuses(query)


def rope_and_cache(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    kv_cache: KVCacheTensor,
    slot_mapping: torch.Tensor,
    rope: Rope,
    write: CacheWrite,
) -> torch.Tensor:
    """Rotate q [T, heads, d] and k [T, kv_heads, d]; write k and v to their slots -> q.

    Rounded to the type of q, then as the cache stores it. A position outside the table gives NaN;
    slot -1 is skipped.

    Args:
        cos_sin, interleaved: as of `rope`.
        rope, write: not called.

    Raises:
        ValueError: when the tensors do not fit together.
    """
    del rope, write
    return _launch(positions, q, k, v, cos_sin, interleaved, kv_cache, slot_mapping, 0)


def rope_and_cache_packed(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    kv_cache: KVCacheTensor,
    slot_mapping: torch.Tensor,
    rope: Rope,
    write: CacheWrite,
) -> torch.Tensor:
    """`rope_and_cache` with a packed pool."""
    del rope, write
    pack = _VECTOR_BYTES // kv_cache.key.dtype.itemsize
    return _launch(positions, q, k, v, cos_sin, interleaved, kv_cache, slot_mapping, pack)


def _launch(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
    kv_cache: KVCacheTensor,
    slots: torch.Tensor,
    pack: int,
) -> torch.Tensor:
    """Args:
    pack: elements of a vector of the packed layout; 0 for the plain one.
    """
    key, value = kv_cache.key, kv_cache.value
    num_blocks, block_size, kv_heads, head_dim = key.shape
    num_tokens, q_heads = q.shape[:2]
    table_rows, rotary_dim = cos_sin.shape
    if (
        q.shape[2] != head_dim
        or k.shape != (num_tokens, kv_heads, head_dim)
        or v.shape != k.shape
        or not len(positions) == len(slots) == num_tokens
        or rotary_dim > head_dim
        or not cos_sin.is_contiguous()
        or value.stride() != key.stride()
        or key.stride(3) != 1
    ):
        raise ValueError(
            f"rope_and_cache wants q, k and v [T, heads, d], a position and a slot for each token, "
            f"a table [positions, at most d], and keys and values that lie alike in [blocks, "
            f"block_size, kv_heads, d], d dense; given q {describe(q)}, k {describe(k)}, v "
            f"{describe(v)}, key {describe(key)}, value {describe(value)}, table "
            f"{describe(cos_sin)}, {len(positions)} positions and {len(slots)} slots"
        )
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    half = triton.next_power_of_2(max(rotary_dim // 2, 1))
    heads = min(triton.next_power_of_2(max(q_heads, kv_heads)), max(_TILE // half, 1))
    q_tiles = triton.cdiv(q_heads, heads)
    quantized = kv_cache.key_scale is not None
    _rope_and_cache[(num_tokens, q_tiles + triton.cdiv(kv_heads, heads))](
        positions, q, k, v, cos_sin, q_out,
        key, value, kv_cache.key_scale, kv_cache.value_scale, slots,
        table_rows, q_heads, kv_heads, q_tiles, num_blocks * block_size,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        key.stride(0), key.stride(1), key.stride(2),
        HEAD_DIM=head_dim, ROTARY=rotary_dim, HALF=half,
        REST=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        WIDTH=triton.next_power_of_2(head_dim), HEADS=heads, INTERLEAVED=interleaved,
        BLOCK_SIZE=block_size, PACK=pack,
        LARGEST=torch.finfo(key.dtype).max if quantized else 0.0, num_warps=4,
    )  # fmt: skip
    return q_out


@triton.jit
def _key_places(
    slot, heads, dims, block_stride, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Where elements [N, D] of a slot's key lie: [blocks, heads, d / PACK, block_size, PACK]."""
    block, at = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if PACK:
        vector = heads * (HEAD_DIM // PACK) + dims // PACK
        places = block * block_stride + (vector * BLOCK_SIZE + at) * PACK + dims % PACK
    else:
        places = block * block_stride + at * token_stride + heads * head_stride + dims
    return places


@triton.jit
def _value_places(
    slot, heads, dims, block_stride, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """The same of its value: [blocks, heads, block_size / PACK, d, PACK]."""
    block, at = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if PACK:
        vector = (heads * (BLOCK_SIZE // PACK) + at // PACK) * HEAD_DIM + dims
        places = block * block_stride + vector * PACK + at % PACK
    else:
        places = block * block_stride + at * token_stride + heads * head_stride + dims
    return places


@triton.jit
def store_rounded(
    at_ptrs, x, mask, scale_ptr, dtype: tl.constexpr, stored: tl.constexpr, LARGEST: tl.constexpr
):
    """Store x as `stored`, after rounding it to the model's `dtype`, which another kernel reads."""
    x = x.to(dtype)
    if scale_ptr is not None:
        x = quantize(x, scale_ptr, stored, LARGEST)
    tl.store(at_ptrs, x.to(stored), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_and_cache(
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    q_out_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slots_ptr,
    table_rows,
    q_heads,
    kv_heads,
    q_tiles,
    num_slots,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    token_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PACK: tl.constexpr,
    LARGEST: tl.constexpr,
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
        return
    slot = tl.load(slots_ptr + token)
    tl.device_assert(slot < num_slots, "slot beyond the cache")
    heads = ((tile - q_tiles) * HEADS + tl.arange(0, HEADS))[:, None]
    # Invalid slots never cause an out-of-bounds write.
    live = (heads < kv_heads) & (slot >= 0) & (slot < num_slots)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    stored: tl.constexpr = key_ptr.dtype.element_ty

    k_heads = k_ptr + token * k_token_stride + heads * k_head_stride
    pairs = tl.arange(0, HALF)[None, :]
    mask = live & (pairs < ROTARY // 2)
    first, second = rotated(k_heads, pairs, mask, cos, sin, ROTARY, INTERLEAVED)
    places = _key_places(
        slot, heads, pairs, block_stride, token_stride, head_stride, HEAD_DIM, BLOCK_SIZE, PACK
    )
    store_rounded(key_ptr + places, first, mask, key_scale_ptr, dtype, stored, LARGEST)
    places = _key_places(
        slot, heads, ROTARY // 2 + pairs, block_stride, token_stride, head_stride,
        HEAD_DIM, BLOCK_SIZE, PACK,
    )  # fmt: skip
    store_rounded(key_ptr + places, second, mask, key_scale_ptr, dtype, stored, LARGEST)
    if ROTARY < HEAD_DIM:
        dims = ROTARY + tl.arange(0, REST)[None, :]
        mask = live & (dims < HEAD_DIM)
        rest = tl.load(k_heads + dims, mask=mask, other=0.0)
        places = _key_places(
            slot, heads, dims, block_stride, token_stride, head_stride, HEAD_DIM, BLOCK_SIZE, PACK
        )
        store_rounded(key_ptr + places, rest, mask, key_scale_ptr, dtype, stored, LARGEST)

    dims = tl.arange(0, WIDTH)[None, :]
    mask = live & (dims < HEAD_DIM)
    v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + dims, mask=mask, other=0.0)
    places = _value_places(
        slot, heads, dims, block_stride, token_stride, head_stride, HEAD_DIM, BLOCK_SIZE, PACK
    )
    store_rounded(value_ptr + places, v, mask, value_scale_ptr, dtype, stored, LARGEST)
