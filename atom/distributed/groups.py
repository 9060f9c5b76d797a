"""Process groups of torch.distributed, made directly and not registered for the process."""

from __future__ import annotations

import threading
import time
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
        self._aborting: list[threading.Thread] = []

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
        # A connection of its own, as the first collective may wait in it for a rank that loads.
        store = PrefixStore(name, self._store).clone()  # type: ignore[attr-defined]
        store.set_timeout(_TIMEOUT)
        return self._keep(dist.ProcessGroupNCCL(store, rank, size, options), rank, size)

    def _keep(self, handle: Any, rank: int, size: int) -> ParallelGroup:
        self._handles.append(handle)
        return ParallelGroup(rank, size, TorchCollectives(handle))

    def abort(self, wait_s: float = 0) -> None:
        """End the groups, from any thread: nothing waits for the other ranks any more.

        NCCL's abort returns once there is no graph any more that has captured one of the group's
        collectives, which may be never. So threads see to it, which also keep the groups from
        being freed: that would wait for the same.

        Args:
            wait_s: how long to wait for it.
        """
        if not self._aborting:
            self._aborting = [
                threading.Thread(target=handle.abort, name="abort-group", daemon=True)
                for handle in self._handles
            ]
            for thread in self._aborting:
                thread.start()
        end = time.monotonic() + wait_s
        for thread in self._aborting:
            thread.join(max(end - time.monotonic(), 0))
