"""Ranks as threads of one process, each with a gloo process group of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from atom.distributed.collectives import TorchCollectives
from atom.distributed.parallel_state import SINGLE, ParallelGroup

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
