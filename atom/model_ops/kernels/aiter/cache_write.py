"""Writes to the KV cache by aiter. A negative slot writes nothing."""

from __future__ import annotations

import functools

import torch

from atom.model_ops.kernels.aiter import probe
from atom.model_ops.kernels.aiter.layout import PackedLayout
from atom.model_ops.kernels.aiter.support import dense_rows, storage_name
from atom.model_ops.kernels.torch.attention import CacheWriteOp
from atom.model_ops.kernels.torch.mla import LatentWriteOp
from atom.model_ops.metadata import KVCacheTensor, LatentCacheTensor


def load_plain() -> CacheWriteOp:
    write = probe.function("reshape_and_cache_flash")

    def kv_cache_write(
        k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write k, v [T, kv_heads, d] to their slots of a plain pool.

        Takes for granted that the kernel divides by the scales, saturates and rounds to the
        nearest even; and that it never reads them of a cache in the model's type.
        """
        key_scale, value_scale = kv_cache.key_scale, kv_cache.value_scale
        if key_scale is None or value_scale is None:
            key_scale = value_scale = _one(k.device)
        storage = storage_name(kv_cache.key_scale)
        pools = kv_cache.key, kv_cache.value
        write(dense_rows(k), dense_rows(v), *pools, slot_mapping, storage, key_scale, value_scale)

    return kv_cache_write


def load_packed() -> CacheWriteOp:
    write = probe.function("reshape_and_cache")
    layout = PackedLayout()

    def kv_cache_write(
        k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write k, v [T, kv_heads, d] to their slots of a packed pool."""
        scales = kv_cache.key_scale, kv_cache.value_scale
        storage = storage_name(kv_cache.key_scale)
        pools = layout.pools(kv_cache)
        write(dense_rows(k), dense_rows(v), *pools, slot_mapping, storage, *scales, True)

    return kv_cache_write


def load_latent() -> LatentWriteOp:
    write = probe.function("concat_and_cache_mla")

    def mla_cache_write(
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        kv_cache: LatentCacheTensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write latent [T, rank] and k_rope [T, rope] to their slots."""
        scale = _one(latent.device) if kv_cache.scale is None else kv_cache.scale
        rows = dense_rows(latent), dense_rows(k_rope)
        write(*rows, kv_cache.latent, slot_mapping, storage_name(kv_cache.scale), scale)

    return mla_cache_write


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)
