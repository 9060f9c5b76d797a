"""The memory budget of the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.config import (
    DEFAULT_CPU_MEMORY_UTILIZATION,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    CacheOptions,
)
from atom.platform import Platform, free_memory_bytes, total_memory_bytes

# Driver memory of a captured graph, which has about a thousand kernel launches.
_BYTES_PER_GRAPH = 8 << 20


def kv_cache_budget(
    options: CacheOptions,
    platform: Platform,
    profile: Callable[[], None],
    graph_bytes: Callable[[], int],
    num_local: int = 1,
) -> int:
    """Bytes for the KV cache pool.

    Args:
        profile: runs the largest steps once, to measure a GPU's peak memory.
        graph_bytes: memory that graph capture will need later; called after `profile`.
        num_local: ranks that share a CPU's memory.
    """
    if options.kv_cache_memory is not None:
        return options.kv_cache_memory
    if not platform.is_gpu:
        share = options.gpu_memory_utilization or DEFAULT_CPU_MEMORY_UTILIZATION
        return int(free_memory_bytes(platform) * share) // num_local
    share = options.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    activations = _peak_bytes(profile) + graph_bytes()
    in_use = total_memory_bytes(platform) - free_memory_bytes(platform)
    return int(total_memory_bytes(platform) * share) - in_use - activations


def estimate_graph_bytes(largest: Callable[[], object], num_graphs: int) -> int:
    """Memory for capturing: the temporaries of the largest bucket, which all graphs share, and the
    graphs themselves.
    """
    return _peak_bytes(largest) + num_graphs * _BYTES_PER_GRAPH


def _peak_bytes(work: Callable[[], object]) -> int:
    """Peak memory of `work` beyond what stays allocated after it."""
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    return peak
