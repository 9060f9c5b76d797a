"""How much memory the KV cache may take."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.config import (
    DEFAULT_CPU_MEMORY_UTILIZATION,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    CacheOptions,
)
from atom.platform import Platform, free_memory_bytes, total_memory_bytes


def kv_cache_budget(options: CacheOptions, platform: Platform, profile: Callable[[], None]) -> int:
    """Bytes for the KV pool.

    Args:
        profile: runs the largest forward pass once, so that a GPU's peak use is known.
    """
    if options.kv_cache_memory is not None:
        return options.kv_cache_memory
    if not platform.is_gpu:
        share = options.gpu_memory_utilization or DEFAULT_CPU_MEMORY_UTILIZATION
        return int(free_memory_bytes(platform) * share)
    share = options.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    torch.cuda.reset_peak_memory_stats()
    profile()
    torch.cuda.synchronize()
    activations = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    in_use = total_memory_bytes(platform) - free_memory_bytes(platform)
    return int(total_memory_bytes(platform) * share) - in_use - activations
