"""What each of a server's engines gets of the machine: GPUs, processors, and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from atom.config import ConfigError, EngineConfig
from atom.environment import environment_with
from atom.model_engine.processes.launched import coupled_engines


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
    # Only here, since it brings torch.
    from atom.model_engine.processes.shares import divide

    return [
        dataclasses.replace(each, name=f"engine {index}")
        for index, each in enumerate(divide(own, number))
    ]
