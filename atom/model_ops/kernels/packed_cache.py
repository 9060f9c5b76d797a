"""The two KV pool layouts for aiter: plain and packed.

Plain is ATOM's own: [blocks, block_size, kv_heads, head_dim]. Packed is what aiter's Gluon decode
kernel reads (unified attention calls it shuffled), with vectors of x elements (16 bytes): keys
[blocks, kv_heads, head_dim / x, block_size, x], values [blocks, kv_heads, block_size / x, head_dim,
x]. A block has the same bytes in both, so code that moves whole blocks need not distinguish them.

A layer's pool is packed if and only if its write, decode and prefill ops are all aiter's packed
ones. These share one condition, `refuses_packed`, so they agree; if an override or a missing entry
point prevents that, `OpTable.resolve_together` chooses plain ops for all.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels.aiter.support import refuses_storage, requires
from atom.model_ops.kernels.probe import EntryPoint, function, lacks_programs
from atom.model_ops.kernels.special_scores import refuses_special_scores
from atom.model_ops.kernels.torch.fp8 import bits, dequantise
from atom.model_ops.registry import OpQuery

UNIFIED_ATTENTION = EntryPoint(
    "aiter.ops.triton.attention.unified_attention:unified_attention",
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal "
    "window_size block_table softcap q_descale k_descale v_descale",
    "shuffled_kv_cache",
)
FLASH_ATTENTION = EntryPoint(
    "aiter.ops.mha:flash_attn_varlen_func",
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "softmax_scale causal window_size return_lse",
)
WRITE_PACKED = EntryPoint(
    "aiter.ops.cache:reshape_and_cache",
    "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale asm_layout",
)
GLUON_DECODE = EntryPoint(
    "aiter.ops.triton.gluon.pa_decode_gluon:pa_decode_gluon",
    "output query key_cache value_cache context_lengths block_tables softmax_scale "
    "query_length max_context_partition_num",
    "context_partition_size compute_type key_scale value_scale ps",
)
# Whether the Gluon decode could import its last step, which the programs below compile at the first
# call. What it would run in its place fails: it passes a parameter that its FlyDSL kernel lacks.
_COMPILED_REDUCE = EntryPoint("aiter.ops.triton.gluon.pa_decode_gluon:CXX_PS_REDUCE_AVAILABLE", "")
_COMPILERS = ("hipcc", "hipconfig", "make")
# Required by every packed implementation, so that they are available together or not at all.
PACKED_ENTRY_POINTS = (
    WRITE_PACKED,
    GLUON_DECODE,
    _COMPILED_REDUCE,
    UNIFIED_ATTENTION,
    FLASH_ATTENTION,
)

# The head size that aiter's tests of Gluon decode use, and the block sizes it compiles for except
# 1024: unified attention reads a packed block as one tile, which would be too large.
_HEAD_DIM = 128
_BLOCK_SIZES = (16, 64)
_VECTOR_BYTES = 16


def _refuses_packing(query: OpQuery) -> str | None:
    """Why this layer's pool must be plain; None if it can be packed."""
    shape = query.shape
    if shape["num_heads"] != shape["num_kv_heads"]:
        return (
            f"packed for the Gluon decode of layers with one query head a KV head; here are "
            f"{shape['num_heads']} and {shape['num_kv_heads']}"
        )
    if shape["head_dim"] != _HEAD_DIM:
        return f"packed caches have head_dim={_HEAD_DIM}, not {shape['head_dim']}"
    if shape["block_size"] not in _BLOCK_SIZES:
        sizes = ", ".join(str(size) for size in _BLOCK_SIZES)
        return f"packed caches have a block_size of {sizes}, not {shape['block_size']}"
    if shape["sliding_window"]:
        return f"the Gluon decode has no sliding_window={shape['sliding_window']}"
    return refuses_special_scores(query) or refuses_storage(query) or _refuses_compiling()


def _refuses_compiling() -> str | None:
    """Why the last step of the Gluon decode cannot be compiled; None if it can."""
    step = "the last step of aiter's Gluon decode is compiled at the first call"
    is_there: Any = function(_COMPILED_REDUCE)
    if not is_there:
        return f"{step}, and its sources cannot be imported (csrc.cpp_itfs)"
    missing = lacks_programs(*_COMPILERS)
    return f"{step}: {missing}" if missing else None


refuses_packed = requires(*PACKED_ENTRY_POINTS, also=_refuses_packing)


def packed_key(key: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, kv_heads, head_dim] -> the same bytes, packed."""
    blocks, block_size, kv_heads, head_dim = key.shape
    x = _VECTOR_BYTES // key.dtype.itemsize
    return key.view(blocks, kv_heads, head_dim // x, block_size, x)


def packed_value(value: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, kv_heads, head_dim] -> the same bytes, packed."""
    blocks, block_size, kv_heads, head_dim = value.shape
    x = _VECTOR_BYTES // value.dtype.itemsize
    return value.view(blocks, kv_heads, block_size // x, head_dim, x)


class CacheLayout(Protocol):
    """Attributes:
    is_packed: which of the two it is.
    """

    is_packed: bool

    def pools(self, cache: KVCacheTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values as the kernels expect them."""
        ...

    def rows(
        self, cache: KVCacheTensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [C, kv_heads, head_dim] of `slots`, as `dtype`."""
        ...


class PlainLayout:
    is_packed = False

    def pools(self, cache: KVCacheTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cache.key, cache.value

    def rows(
        self, cache: KVCacheTensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = bits(cache.key).flatten(0, 1)[slots].view(cache.key.dtype)
        value = bits(cache.value).flatten(0, 1)[slots].view(cache.value.dtype)
        return _real(key, cache.key_scale, dtype), _real(value, cache.value_scale, dtype)


class PackedLayout:
    is_packed = True

    def pools(self, cache: KVCacheTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return packed_key(cache.key), packed_value(cache.value)

    def rows(
        self, cache: KVCacheTensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.pools(cache)
        blocks, offsets = slots // cache.block_size, slots % cache.block_size
        x = value.shape[4]
        keys = bits(key)[blocks, :, :, offsets].flatten(2).view(key.dtype)
        values = bits(value)[blocks, :, offsets // x, :, offsets % x].view(value.dtype)
        return _real(keys, cache.key_scale, dtype), _real(values, cache.value_scale, dtype)


def _real(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if scale is None else dequantise(x, scale, dtype)
