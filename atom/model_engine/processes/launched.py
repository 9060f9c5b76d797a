"""Which process of an engine of several ranks this one is, before torch is imported."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from dataclasses import replace

from atom import logs
from atom.config import ConfigError, EngineConfig
from atom.distributed.launch import LocalRanks
from atom.distributed.rank_environment import LOOPBACK, RankEnvironment, launched_rank
from atom.environment import rank_variables
from atom.options.parallel import DEFAULT_MASTER_PORT, ParallelOptions

logger = logging.getLogger(__name__)


def run_as_follower_if_launched(config: EngineConfig) -> int | None:
    """Be another rank, or start those of this machine, until rank 0 ends.

    Every program that builds an engine calls it first.

    Returns:
        The exit status for the process; None in the one that is to build the engine, which is
        rank 0 or alone.

    Raises:
        ConfigError: when what a launcher set in the environment contradicts the options.
    """
    environment = launched_environment(config)
    if config.parallel.couples_engines and (environment or config.parallel.nnodes > 1):
        raise ConfigError(
            f"the {config.parallel.data_parallel_size} engines of --data-parallel-size that share "
            f"experts are on one machine, and the server starts them all: leave out --nnodes, and "
            f"any launcher"
        )
    if config.parallel.node_rank > 0:
        return _supervise(config)
    if environment is None or environment.rank == 0:
        return None
    from atom.model_engine.processes.rank_process import follow_rank_0

    return follow_rank_0(config, environment)


def launched_environment(config: EngineConfig) -> RankEnvironment | None:
    """Which rank a launcher made this process; None when none did.

    Raises:
        ConfigError: when what it set contradicts the options.
    """
    parallel, environment = config.parallel, launched_rank(rank_variables())
    if environment is None:
        return None
    size = environment.world_size
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise ConfigError(
            f"RANK={environment.rank} and WORLD_SIZE={size} in the environment say that a launcher "
            f"started this process, so --nnodes and Ray have no place; leave out one or the other"
        )
    if parallel.num_replicas > 1:
        raise ConfigError(
            f"WORLD_SIZE={size} in the environment says that a launcher started this process as a "
            f"rank, and the {parallel.num_replicas} replicas of --data-parallel-size share no "
            f"ranks: start a server for each, or one server without the launcher"
        )
    if size != parallel.num_ranks:
        raise ConfigError(
            f"WORLD_SIZE={size} in the environment, but --tensor-parallel-size "
            f"{parallel.tensor_parallel_size} and --data-parallel-size "
            f"{parallel.data_parallel_size} make {parallel.num_ranks} ranks; for an engine of its "
            f"own in every process, unset RANK and WORLD_SIZE"
        )
    return environment


def by_hand(parallel: ParallelOptions) -> RankEnvironment:
    """Where the ranks meet that no launcher has started; as rank 0 sees it."""
    spans_machines = parallel.nnodes > 1
    return RankEnvironment(
        rank=0,
        world_size=parallel.num_ranks,
        local_rank=0,
        master_addr=parallel.master_addr or LOOPBACK,
        master_port=parallel.master_port or (DEFAULT_MASTER_PORT if spans_machines else 0),
        spans_machines=spans_machines,
    )


def ranks_per_node(parallel: ParallelOptions) -> int:
    return parallel.num_ranks // parallel.nnodes


def local_ranks(parallel: ParallelOptions, meeting: RankEnvironment) -> list[RankEnvironment]:
    """The ranks that this machine has to start."""
    first = parallel.node_rank * ranks_per_node(parallel)
    every = (
        replace(meeting, rank=first + index, local_rank=index)
        for index in range(ranks_per_node(parallel))
    )
    return [each for each in every if each.rank != 0]


def coupled_engines(parallel: ParallelOptions) -> list[RankEnvironment]:
    """The first ranks of engines that share experts, which the server starts on this machine."""
    size, port = parallel.tensor_parallel_size, parallel.master_port or _free_port()
    firsts = range(0, parallel.num_ranks, size)
    return [RankEnvironment(first, parallel.num_ranks, first, master_port=port) for first in firsts]


def _free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def coupled_others(parallel: ParallelOptions, first: RankEnvironment) -> list[RankEnvironment]:
    """The ranks that one of these first ranks has to start."""
    return [
        replace(first, rank=first.rank + index, local_rank=first.local_rank + index)
        for index in range(1, parallel.tensor_parallel_size)
    ]


def instructions(config: EngineConfig) -> bytes:
    """What the process of a rank is told on its standard input."""
    from atom.model_engine.processes import wire  # it takes a while, and few programs start ranks

    return wire.encode(wire.Start(config, *logs.settings()))


def _supervise(config: EngineConfig) -> int:
    """Start the ranks of a machine other than 0, and end with them; a signal ends them."""
    meeting = by_hand(config.parallel)
    environments = local_ranks(config.parallel, meeting)
    ranks = LocalRanks(environments, instructions(config))
    stopped = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
    logger.info(
        "ranks %d to %d follow rank 0 at %s",
        environments[0].rank,
        environments[-1].rank,
        meeting.address,
    )
    try:
        return ranks.wait(stopped)
    finally:
        ranks.close()
