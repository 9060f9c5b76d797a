"""How this process becomes a rank: as the first one, or as one that follows it."""

from __future__ import annotations

from dataclasses import replace

import torch

from atom.config import ConfigError, EngineConfig
from atom.distributed.connection import RankDriver, RankFollower
from atom.distributed.launch import Launched, LocalRanks
from atom.distributed.rank_environment import RankEnvironment
from atom.distributed.rendezvous import MEETING_SECONDS, meet, meet_as_first, refuse, refuse_all
from atom.distributed.store import Store, host_store, listen, reach_store, scope
from atom.model_engine.processes.launched import (
    by_hand,
    coupled_others,
    instructions,
    launched_environment,
    local_ranks,
    ranks_per_node,
)
from atom.model_engine.processes.own_card import own_card
from atom.platform import select_platform

# Ranks that a launcher started follow one engine, and end with it.
_has_driven = False


def join_as_driver(config: EngineConfig) -> RankDriver:
    """Be an engine's first rank: start the others, unless a launcher has, and meet all.

    Raises:
        ConfigError: when the ranks do not fit together, or not all have come.
        RankStartError: when one has died.
    """
    environment = launched_environment(config)
    if config.parallel.couples_engines:
        return _drive_coupled(config, environment)
    if environment is not None:
        _refuse_second_engine()
        _check_devices(config, environment.local_rank + 1)
        root, environment = _open_store(environment)
        return _drive(config, scope(root, environment), environment, None)
    if config.parallel.distributed_executor_backend == "ray":
        return _drive_on_ray(config)
    _check_devices(config, ranks_per_node(config.parallel))
    root, environment = _open_store(by_hand(config.parallel))
    others = LocalRanks(local_ranks(config.parallel, environment), instructions(config))
    return _drive(config, scope(root, environment), environment, others)


def join_as_follower(config: EngineConfig, environment: RankEnvironment) -> RankFollower:
    """Be another rank: meet all.

    Raises:
        ConfigError: when rank 0 refuses the engine, or has no place for this process.
        RankStartError: when rank 0 does not come, or has ended.
    """
    store = scope(reach_store(environment, MEETING_SECONDS), environment)
    try:
        _check_devices(config, environment.local_rank + 1)
        card = own_card(config, environment.rank, environment.local_rank, environment.world_size)
    except Exception as error:
        refuse(store, f"rank {environment.rank}: {error}")
        raise
    cards = meet(store, card)
    size = config.parallel.tensor_parallel_size
    return RankFollower(store, environment, cards, size, _device(config, environment))


def _check_devices(config: EngineConfig, number: int) -> None:
    """Raises:
    ConfigError: when this machine has fewer GPUs than its ranks need.
    """
    if not select_platform(config.device).is_gpu:
        return
    if (there := torch.cuda.device_count()) < number:
        raise ConfigError(
            f"{number} ranks of this machine need a GPU each, and torch sees {there}; lower "
            f"--tensor-parallel-size, or let every rank see all GPUs of its machine"
        )


def _open_store(environment: RankEnvironment) -> tuple[Store, RankEnvironment]:
    """The store, and the environment with its port."""
    if environment.store_is_launchers:
        return reach_store(environment, MEETING_SECONDS), environment
    listener = listen(environment)
    environment = replace(environment, master_port=listener.getsockname()[1])
    return host_store(listener), environment


def _drive(
    config: EngineConfig, store: Store, environment: RankEnvironment, launched: Launched | None
) -> RankDriver:
    rank, size = environment.rank, config.parallel.tensor_parallel_size
    check = launched.check if launched else lambda: None
    try:
        try:
            card = own_card(config, rank, environment.local_rank, environment.world_size)
        except Exception as error:
            reason = f"rank {rank}: {error}"
            if rank == 0:
                refuse_all(store, reason, environment.world_size)
            else:
                refuse(store, reason)
            raise
        cards = (meet_as_first if rank == 0 else meet)(store, card, check)
        device = _device(config, environment)
        return RankDriver(store, environment, cards, size, device, launched)
    except BaseException:
        if launched is not None:
            launched.close()
        raise


def _drive_coupled(config: EngineConfig, environment: RankEnvironment | None) -> RankDriver:
    """Be the first rank of one of several engines, each of which starts its own others."""
    parallel = config.parallel
    if environment is None:
        raise ConfigError(
            f"data_parallel_size={parallel.data_parallel_size} with enable_expert_parallel means "
            f"several engines that share the experts, which only the server starts"
        )
    _check_devices(config, environment.local_rank + parallel.tensor_parallel_size)
    if environment.rank == 0:
        root, environment = _open_store(environment)
    else:
        root = reach_store(environment, MEETING_SECONDS)
    others = LocalRanks(coupled_others(parallel, environment), instructions(config))
    return _drive(config, scope(root, environment), environment, others)


def _drive_on_ray(config: EngineConfig) -> RankDriver:
    from atom.distributed.ray_launch import place_ranks

    ranks = place_ranks(config.parallel, config.device)
    try:
        _check_devices(config, 1)
        root, environment = _open_store(ranks.meeting)
        ranks.start(environment, instructions(config))
    except BaseException:
        ranks.close()
        raise
    return _drive(config, scope(root, environment), environment, ranks)


def _device(config: EngineConfig, environment: RankEnvironment) -> torch.device:
    platform = select_platform(config.device)
    return torch.device("cuda", environment.local_rank) if platform.is_gpu else platform.device


def _refuse_second_engine() -> None:
    global _has_driven
    if _has_driven:
        raise ConfigError(
            "a launcher started the ranks for one engine, which this process has had; start "
            "another one without it"
        )
    _has_driven = True
