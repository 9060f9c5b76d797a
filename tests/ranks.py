"""Ranks as threads of one process, each with a gloo process group of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar
from unittest.mock import patch

import torch.distributed as dist

from atom.config import EngineConfig
from atom.distributed.collectives import TorchCollectives
from atom.distributed.parallel_state import SINGLE, ParallelGroup, ParallelGroups
from atom.distributed.stages import Stages
from atom.model_engine import executor
from atom.model_engine.processes import join

Result = TypeVar("Result")

_TIMEOUT = timedelta(seconds=120)


class Ranks:
    """Groups of ranks that meet by name."""

    def __init__(self, timeout: timedelta = _TIMEOUT) -> None:
        self._store = dist.HashStore()
        self._timeout = timeout

    def group(self, name: str, rank: int, size: int) -> ParallelGroup:
        """Blocks until all `size` ranks have asked for this name; each must ask in a thread."""
        if size == 1:
            return SINGLE
        store = dist.PrefixStore(name, self._store)
        handle = dist.ProcessGroupGloo(store, rank, size, self._timeout)
        return ParallelGroup(rank, size, TorchCollectives(handle))


def run_ranks(size: int, function: Callable[[ParallelGroup], Result]) -> list[Result]:
    """What `function` returns on each rank; the first error of any rank is raised."""
    ranks = Ranks()
    return run_threads(size, lambda rank: function(ranks.group("all", rank, size)))


def run_threads(count: int, function: Callable[[int], Result]) -> list[Result]:
    """What `function` returns for 0, 1, ... in a thread each; the first error is raised."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(0.02)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(count)]


class ThreadFollower:
    """A rank in a thread of its own, from its first moment to `None` in its queue."""

    def __init__(self, config: EngineConfig, rank: int, ranks: Ranks, engine: int) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()
        self.cause: str | None = None
        self.stages = Stages()
        self._config = config
        self._rank = rank
        self._ranks = ranks
        self._engine = engine
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def receive(self) -> bytes | None:
        return self.messages.get()

    def failed(self, cause: str) -> None:
        self.cause = cause

    def close(self) -> None:
        """Nothing is open."""

    def _run(self) -> None:
        self.groups = groups_of(self._ranks, self._rank, self._config, self._engine)
        with suppress(Exception):  # the driver has its cause
            executor.follow(self._config, self)


class ThreadDriver:
    """The first rank, and the others as threads, which are not watched.

    Args:
        ranks: where engines that share experts meet.
        engine: the number of this one.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks | None = None, engine: int = 0) -> None:
        ranks, size = ranks or Ranks(), config.parallel.tensor_parallel_size
        self.stages = Stages()
        self.followers = [ThreadFollower(config, rank, ranks, engine) for rank in range(1, size)]
        self.groups = groups_of(ranks, 0, config, engine)

    lost: str | None = None
    awaited: list[str] = []  # noqa: RUF012
    is_awaited = True

    def publish(self, data: bytes) -> None:
        for follower in self.followers:
            follower.messages.put(data)

    def failure(self) -> str | None:
        for rank, follower in enumerate(self.followers, 1):
            if follower.cause is not None:
                return f"rank {rank} raised {follower.cause}"
        return None

    def close(self, cause: str | None = None) -> None:
        for follower in self.followers:
            follower.messages.put(None)
        for follower in self.followers:
            follower.thread.join(10)


def groups_of(ranks: Ranks, rank: int, config: EngineConfig, engine: int) -> ParallelGroups:
    size = config.parallel.tensor_parallel_size
    groups = [ranks.group(f"{name} {engine}", rank, size) for name in ("tensor", "control")]
    if not config.parallel.couples_engines:
        return ParallelGroups(*groups, local_rank=rank, num_local=size)
    num_engines = config.parallel.data_parallel_size
    groups.append(ranks.group("experts", engine * size + rank, num_engines * size))
    groups.append(ranks.group("engines", engine, num_engines) if rank == 0 else SINGLE)
    return ParallelGroups(*groups, local_rank=rank, num_local=size)


@contextmanager
def engines_of_threads() -> Iterator[None]:
    """Engines that are built in here run their ranks as threads of this process."""
    with patch.object(join, "join_as_driver", ThreadDriver):
        yield
