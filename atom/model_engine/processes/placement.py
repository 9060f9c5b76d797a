"""What each of a server's engines gets of the machine: GPUs, processors, and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from atom.config import DEFAULT_CPU_MEMORY_UTILIZATION, ConfigError, EngineConfig
from atom.environment import environment_with, visible_devices
from atom.model_engine.processes.launched import coupled_engines
from atom.platform import cpus_by_core, default_num_threads, num_gpus


@dataclass(frozen=True)
class Placement:
    """Attributes:
    config: the engine's own; a replica's knows nothing of the others.
    cpus: the processors it keeps to; any when empty.
    environment: its process's; None for this process's own.
    name: what its log calls it.
    """

    config: EngineConfig
    cpus: tuple[int, ...] = ()
    environment: Mapping[str, str] | None = None
    name: str = "engine"


def place_engines(config: EngineConfig) -> list[Placement]:
    """Divide the machine: replicas get shares, and a single engine all of it.

    Engines that share experts divide it themselves, since they know of each other.

    Raises:
        ConfigError: when there are not enough GPUs, or the replicas would lie on several machines.
    """
    parallel = config.parallel
    number = parallel.num_replicas
    if parallel.couples_engines:
        return [
            Placement(config, environment=environment_with(first.variables()), name=f"engine {i}")
            for i, first in enumerate(coupled_engines(parallel))
        ]
    if number == 1:
        return [Placement(config)]
    if parallel.nnodes > 1:
        raise ConfigError(
            f"data_parallel_size={number} replicas are on one machine, and nnodes is "
            f"{parallel.nnodes}; start a server on each machine, or use atom.entrypoints.ray_serve"
        )
    if parallel.master_port is not None:
        raise ConfigError(
            f"each of the {number} replicas needs a master_port of its own; leave it out"
        )
    own = dataclasses.replace(config, parallel=dataclasses.replace(parallel, data_parallel_size=1))
    divide = _on_gpus if config.device != "cpu" and num_gpus() else _on_processors
    return [
        dataclasses.replace(each, name=f"engine {index}")
        for index, each in enumerate(divide(own, number))
    ]


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
