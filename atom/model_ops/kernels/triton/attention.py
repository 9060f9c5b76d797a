"""When the kernels over a paged KV cache can run; imports Triton only when one is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom.model_ops.registry import OpQuery
from atom.platform import Platform

if TYPE_CHECKING:
    from atom.model_ops.kernels.torch.attention import CacheWriteOp, PagedAttentionOp

_LARGEST_HEAD = 256
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


def refuses(query: OpQuery) -> str | None:
    """Why attention cannot be computed; None when it can."""
    head_dim = query.shape["head_dim"]
    if head_dim > _LARGEST_HEAD:
        return f"head_dim={head_dim} is larger than {_LARGEST_HEAD}"
    return refuses_storage(query)


def refuses_storage(query: OpQuery) -> str | None:
    """Why a cache of this type can be neither read nor written; None when it can."""
    storage, platform = query.storage, query.platform
    if storage is None or storage in _WIDE:
        return None
    if storage not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        return f"no kernel for a cache of {storage}"
    known = storage in _eight_bit_types(platform)
    return None if known else f"{platform.arch} does not convert {storage}"


def _eight_bit_types(platform: Platform) -> tuple[torch.dtype, ...]:
    """What Triton converts: in software where an AMD arch cannot, in hardware only on NVIDIA."""
    if platform.kind != "cuda":
        return torch.float8_e4m3fn, torch.float8_e4m3fnuz
    capability = int(platform.arch.removeprefix("sm"))
    return (torch.float8_e4m3fn,) if capability >= 89 else ()


def load_paged_attention() -> PagedAttentionOp:
    from atom.model_ops.kernels.triton import paged_attention

    return paged_attention.load()


def load_prefill_attention() -> PagedAttentionOp:
    from atom.model_ops.kernels.triton.prefill_attention import prefill_attention

    return prefill_attention


def load_kv_cache_write() -> CacheWriteOp:
    from atom.model_ops.kernels.triton.cache_write import kv_cache_write

    return kv_cache_write
