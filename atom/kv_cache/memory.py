"""The memory budget of the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.config import (
    DEFAULT_CPU_MEMORY_UTILIZATION,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    CacheOptions,
)
from atom.kv_cache.base import KVCacheMemoryError
from atom.platform import Platform, free_memory_bytes, total_memory_bytes

# Runs work -> the peak of its memory beyond what stays allocated after it, in bytes.
PeakOf = Callable[[Callable[[], object]], int]
# Driver memory of a captured graph: of the target's layers, about a thousand launches, and of what
# follows them, fewer than a hundred.
_BYTES_PER_GRAPH, _BYTES_PER_SMALL_GRAPH = 8 << 20, 1 << 20


def kv_cache_budget(
    options: CacheOptions,
    platform: Platform,
    profile: Callable[[], None],
    graph_bytes: Callable[[], int],
    num_local: int = 1,
    fixed_bytes: int = 0,
) -> int:
    """Bytes for the blocks of the KV cache; negative where what is fixed leaves none.

    Args:
        profile: runs the largest steps once, to measure a GPU's peak memory.
        graph_bytes: memory that graph capture will need later; called after `profile`.
        num_local: ranks that share a CPU's memory.
        fixed_bytes: what the cache takes besides. On a GPU `profile` allocates it, so that it is in
            use when the rest is measured.
    """
    if options.kv_cache_memory is not None:
        return options.kv_cache_memory - fixed_bytes
    if not platform.is_gpu:
        share = options.gpu_memory_utilization or DEFAULT_CPU_MEMORY_UTILIZATION
        return int(free_memory_bytes(platform) * share) // num_local - fixed_bytes
    share = options.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    activations = peak_bytes(profile) + graph_bytes()
    in_use = total_memory_bytes(platform) - free_memory_bytes(platform)
    return int(total_memory_bytes(platform) * share) - in_use - activations


def check_room(pool_bytes: int, platform: Platform, num_local: int) -> None:
    """Refuse a pool that a CPU's memory could not hold once it is full: its pages are taken late.

    Args:
        num_local: ranks that share a CPU's memory, each with such a pool.

    Raises:
        KVCacheMemoryError: with the numbers.
    """
    if platform.is_gpu:
        return
    free = free_memory_bytes(platform) // num_local
    if pool_bytes > free:
        raise KVCacheMemoryError(
            f"the KV cache would take {pool_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are "
            f"free; lower --kv-cache-memory, --max-num-seqs or --max-model-len"
        )


def estimate_graph_bytes(
    layers: Callable[[], object],
    others: Callable[[], object],
    num_layers: int,
    num_others: int,
    peak_of: PeakOf,
) -> int:
    """Memory for capturing: the temporaries of the largest bucket, which all graphs share, and the
    graphs themselves.

    Args:
        layers, others: run the largest step's layers, and then what follows them.
        num_layers, num_others: graphs of each.
        peak_of: `peak_bytes`, or what stands for it where nothing runs.
    """
    graphs = num_layers * _BYTES_PER_GRAPH + num_others * _BYTES_PER_SMALL_GRAPH
    return peak_of(layers) + peak_of(others) + graphs


def peak_bytes(work: Callable[[], object]) -> int:
    """Peak memory of `work` beyond what stays allocated after it."""
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    return peak
