"""KV cache writes with aiter. Negative slots are skipped."""

from __future__ import annotations

import functools

import torch

from atom.model_ops.attention.metadata import KVCacheTensor, LatentCacheTensor
from atom.model_ops.kernels.aiter.support import (
    bounded,
    refuses_storage,
    requires,
    storage_name,
)
from atom.model_ops.kernels.packed_cache import WRITE_PACKED, PackedLayout
from atom.model_ops.kernels.probe import EntryPoint, function

_WRITE_PLAIN = EntryPoint(
    "aiter.ops.cache:reshape_and_cache_flash",
    "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
)
_WRITE_LATENT = EntryPoint(
    "aiter.ops.cache:concat_and_cache_mla",
    "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale",
)

refuses_plain = requires(_WRITE_PLAIN, also=refuses_storage)
refuses_latent = requires(_WRITE_LATENT, also=refuses_storage)


def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [T, kv_heads, d] to their slots of a plain pool.

    Assumes that the kernel divides by the scales and rounds to nearest even, and does not read the
    scales of a cache in the model's dtype.
    """
    key_scale, value_scale = kv_cache.key_scale, kv_cache.value_scale
    rows = _bounded_rows(k, v, kv_cache)
    if key_scale is None or value_scale is None:
        key_scale = value_scale = _one(k.device)
    storage = storage_name(kv_cache.key_scale)
    pools = kv_cache.key, kv_cache.value
    function(_WRITE_PLAIN)(*rows, *pools, slot_mapping, storage, key_scale, value_scale)


def kv_cache_write_packed(
    k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [T, kv_heads, d] to their slots of a packed pool."""
    scales = kv_cache.key_scale, kv_cache.value_scale
    storage = storage_name(kv_cache.key_scale)
    pools = PackedLayout().pools(kv_cache)
    rows = _bounded_rows(k, v, kv_cache)
    function(WRITE_PACKED)(*rows, *pools, slot_mapping, storage, *scales, True)


def mla_cache_write(
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    kv_cache: LatentCacheTensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write latent [T, rank] and k_rope [T, rope] to their slots."""
    scale = _one(latent.device) if kv_cache.scale is None else kv_cache.scale
    storage = kv_cache.latent.dtype
    rows = [bounded(x, kv_cache.scale, storage) for x in (latent, k_rope)]
    function(_WRITE_LATENT)(
        *rows, kv_cache.latent, slot_mapping, storage_name(kv_cache.scale), scale
    )


def _bounded_rows(
    k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    key = bounded(k, kv_cache.key_scale, kv_cache.key.dtype)
    return key, bounded(v, kv_cache.value_scale, kv_cache.value.dtype)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)
