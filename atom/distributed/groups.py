"""Process groups of torch.distributed, made directly and not registered for the process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atom.distributed.collectives import TorchCollectives
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.distributed.store import PrefixStore, Store

# To make a group, which all ranks do right after they have met.
_MEETING = timedelta(seconds=60)
# The ranks load at their own speed; who is dead or stuck is found out otherwise (`watch.py`).
_TIMEOUT = timedelta(minutes=30)


class ProcessGroups:
    """Makes groups of this rank, and ends them.

    Args:
        store: where the ranks find each other.
        address: of this machine, as the other ranks reach it; gloo listens there and nowhere else.
    """

    def __init__(self, store: Store, address: str) -> None:
        self._store = store
        self._address = address
        self._handles: list[Any] = []

    def of_host_tensors(self, name: str, rank: int, size: int) -> ParallelGroup:
        """Over gloo; waits until all ranks have asked for this name."""
        if size == 1:
            return SINGLE
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = _MEETING
        store = PrefixStore(name, self._store)
        handle = dist.ProcessGroupGloo(store, rank, size, options)
        handle._set_default_timeout(_TIMEOUT)
        return self._keep(handle, rank, size)

    def of_device_tensors(
        self, name: str, rank: int, size: int, device: torch.device
    ) -> ParallelGroup:
        """Over NCCL or RCCL on a GPU, whose connections are made by the first collective."""
        if size == 1 or device.type == "cpu":
            return self.of_host_tensors(name, rank, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        store = PrefixStore(name, self._store)
        return self._keep(dist.ProcessGroupNCCL(store, rank, size, options), rank, size)

    def _keep(self, handle: Any, rank: int, size: int) -> ParallelGroup:
        self._handles.append(handle)
        return ParallelGroup(rank, size, TorchCollectives(handle))

    def at(self, store: Store) -> ProcessGroups:
        """Makes groups of ranks that find each other elsewhere; they end with these."""
        groups = ProcessGroups(store, self._address)
        groups._handles = self._handles
        return groups

    def abort(self) -> None:
        """End the groups, from any thread: nothing waits for the other ranks any more.

        An orderly end of NCCL's would wait for graphs that hold its kernels. Gloo notices that a
        rank is gone by itself, and ends with the last that holds a group.
        """
        for handle in self._handles:
            handle.abort()
