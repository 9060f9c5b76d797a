"""The shares of the machine that replicas get: GPUs, or processors and memory."""

from __future__ import annotations

import dataclasses

import torch

from atom.config import DEFAULT_CPU_MEMORY_UTILIZATION, ConfigError, EngineConfig
from atom.environment import environment_with, visible_devices
from atom.model_engine.processes.placement import Placement
from atom.platform import num_gpus
from atom.processors import cpus_by_core, default_num_threads


def divide(own: EngineConfig, number: int) -> list[Placement]:
    """Args:
        own: what each replica is told.

    Raises:
        ConfigError: when there are not enough GPUs.
    """
    if own.device != "cpu" and num_gpus():
        return _on_gpus(own, number)
    return _on_processors(own, number)


def _on_gpus(own: EngineConfig, number: int) -> list[Placement]:
    if own.parallel.distributed_executor_backend == "ray":
        return [Placement(own)] * number  # Ray gives each rank its GPU
    size = own.parallel.tensor_parallel_size
    if number * size > num_gpus():
        raise ConfigError(
            f"{number} replicas of {size} GPUs each need {number * size}, and "
            f"{num_gpus()} are visible"
        )
    is_rocm = torch.version.hip is not None
    variable = "HIP_VISIBLE_DEVICES" if is_rocm else "CUDA_VISIBLE_DEVICES"
    names = visible_devices(is_rocm) or [str(index) for index in range(num_gpus())]
    shares = [names[start : start + size] for start in range(0, number * size, size)]
    return [
        Placement(own, environment=environment_with({variable: ",".join(share)}))
        for share in shares
    ]


def _on_processors(own: EngineConfig, number: int) -> list[Placement]:
    """Each has its share of the KV cache's memory, and processors, or threads, of its own."""
    share = own.cache.gpu_memory_utilization or DEFAULT_CPU_MEMORY_UTILIZATION
    cache = dataclasses.replace(own.cache, gpu_memory_utilization=share / number)
    own = dataclasses.replace(own, cache=cache)
    if own.parallel.num_threads is not None:
        return [Placement(own)] * number
    cpus = cpus_by_core()
    if size := len(cpus) // number:
        starts = range(0, number * size, size)
        return [Placement(own, tuple(cpus[start : start + size])) for start in starts]
    threads = max(default_num_threads() // (number * own.parallel.tensor_parallel_size), 1)
    parallel = dataclasses.replace(own.parallel, num_threads=threads)
    return [Placement(dataclasses.replace(own, parallel=parallel))] * number
