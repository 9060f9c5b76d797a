"""Ranks as threads of one process, each with a gloo process group of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar
from unittest.mock import patch

import torch.distributed as dist

from atom.config import EngineConfig
from atom.distributed.collectives import TorchCollectives
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.distributed.place import Place
from atom.model_engine import executor

Result = TypeVar("Result")

_TIMEOUT = timedelta(seconds=120)


class Ranks:
    """Groups of ranks that meet by name."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def group(self, name: str, rank: int, size: int) -> ParallelGroup:
        """Blocks until all `size` ranks have asked for this name; each must ask in a thread."""
        if size == 1:
            return SINGLE
        store = dist.PrefixStore(name, self._store)
        handle = dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)
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

    def __init__(self, config: EngineConfig, rank: int, ranks: Ranks) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()
        self.cause: str | None = None
        self._config = config
        self._rank = rank
        self._ranks = ranks
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def receive(self) -> bytes | None:
        return self.messages.get()

    def failed(self, cause: str) -> None:
        self.cause = cause

    def close(self) -> None:
        """Nothing is open."""

    def _run(self) -> None:
        self.place = place_of(self._ranks, self._rank, self._config)
        executor.follow(self._config, self)


class ThreadDriver:
    """The first rank, and the others as threads."""

    def __init__(self, config: EngineConfig) -> None:
        ranks, size = Ranks(), config.parallel.tensor_parallel_size
        self.followers = [ThreadFollower(config, rank, ranks) for rank in range(1, size)]
        self.place = place_of(ranks, 0, config)

    def publish(self, data: bytes) -> None:
        for follower in self.followers:
            follower.messages.put(data)

    def failure(self) -> str | None:
        for rank, follower in enumerate(self.followers, 1):
            if follower.cause is not None:
                return f"rank {rank} raised {follower.cause}"
        return None

    def close(self) -> None:
        for follower in self.followers:
            follower.messages.put(None)
        for follower in self.followers:
            follower.thread.join(10)


def place_of(ranks: Ranks, rank: int, config: EngineConfig) -> Place:
    size = config.parallel.tensor_parallel_size
    groups = [ranks.group(name, rank, size) for name in ("tensor", "control")]
    return Place(*groups, rank, size)


@contextmanager
def engines_of_threads() -> Iterator[None]:
    """Engines that are built in here run their ranks as threads of this process."""
    with patch.object(executor, "join_as_driver", ThreadDriver):
        yield
