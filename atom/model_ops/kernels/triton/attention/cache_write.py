"""Write new keys and values to their slots of the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels.triton.attention.flash import describe

_LARGEST_TILE = 1024


@triton.jit
def quantize(x, scale_ptr, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """x / scale as an FP8 type: rounded to nearest even, saturated, NaN preserved."""
    scaled = tl.div_rn(x.to(tl.float32), tl.full(x.shape, 0.0, tl.float32) + tl.load(scale_ptr))
    scaled = tl.where(scaled > LARGEST, LARGEST, scaled)
    scaled = tl.where(scaled < -LARGEST, -LARGEST, scaled)
    return scaled.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write(
    k_ptr,
    v_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slots_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    token_stride,
    head_stride,
    num_slots,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Grid: tokens, tiles of a token's SIZE = kv_heads * d elements."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    tl.device_assert(slot < num_slots, "slot beyond the cache")
    elements = tl.program_id(1) * TILE + tl.arange(0, TILE)
    # Invalid slots never cause an out-of-bounds write.
    mask = (elements < SIZE) & (slot >= 0) & (slot < num_slots)
    heads = elements // HEAD_DIM
    dims = elements % HEAD_DIM
    k = tl.load(k_ptr + token * k_token_stride + heads * k_head_stride + dims, mask=mask)
    v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + dims, mask=mask)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    places = place + heads * head_stride + dims
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    if QUANTIZED:
        k = quantize(k, key_scale_ptr, dtype, LARGEST)
        v = quantize(v, value_scale_ptr, dtype, LARGEST)
    tl.store(key_ptr + places, k.to(dtype), mask=mask)
    tl.store(value_ptr + places, v.to(dtype), mask=mask)


def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [T, kv_heads, d] to their slots [T] int64; slot -1 is skipped.

    Raises:
        ValueError: when the tensors do not fit together.
    """
    key, value = kv_cache.key, kv_cache.value
    num_blocks, block_size, kv_heads, head_dim = key.shape
    shape = (slot_mapping.shape[0], kv_heads, head_dim)
    if (
        k.shape != shape
        or v.shape != shape
        or value.stride() != key.stride()
        or not k.stride(2) == v.stride(2) == key.stride(3) == 1
    ):
        raise ValueError(
            f"kv_cache_write wants k and v [T, kv_heads, d] and a slot for each token, and keys "
            f"and values that lie alike in [blocks, block_size, kv_heads, d], d dense; given k "
            f"{describe(k)}, v {describe(v)}, key {describe(key)}, value {describe(value)}, "
            f"{slot_mapping.shape[0]} slots"
        )
    size = kv_heads * head_dim
    tile = min(triton.next_power_of_2(size), _LARGEST_TILE)
    quantized = kv_cache.key_scale is not None
    _write[(shape[0], triton.cdiv(size, tile))](
        k,
        v,
        key,
        value,
        kv_cache.key_scale,
        kv_cache.value_scale,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        key.stride(0),
        key.stride(1),
        key.stride(2),
        num_blocks * block_size,
        SIZE=size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=tile,
        QUANTIZED=quantized,
        LARGEST=torch.finfo(key.dtype).max if quantized else 0.0,
        num_warps=4,
    )
