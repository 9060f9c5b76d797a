"""What connects ranks that have met: groups, the channel of orders, and the watch."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from atom.distributed.broadcast import Address, Publisher, Subscriber
from atom.distributed.channel import ChannelClosedError
from atom.distributed.collectives import TorchCollectives
from atom.distributed.heartbeats import RankFailure, WatchAddress
from atom.distributed.launch import Launched
from atom.distributed.parallel_state import SINGLE, ParallelGroup, ParallelGroups
from atom.distributed.rank_environment import RankEnvironment
from atom.distributed.rendezvous import RankCard
from atom.distributed.stages import Stages
from atom.distributed.store import PrefixStore, Store, await_key, interface_of, own_address
from atom.distributed.watch import RankReporter, RankWatch
from atom.environment import set_default

# Process groups of torch.distributed, made directly and not registered for the process.

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


logger = logging.getLogger(__name__)

# To connect, once all have met.
_CONNECT_SECONDS = 60.0
# A failure shows on several ranks; for the watch to find out where it began.
_CAUSE_SECONDS = 1.5
# What waits in a collective for a rank that is gone may be beyond help.
_LAST_SECONDS = 10.0
# At an orderly end, for communicators to end before the process does.
_ABORT_SECONDS = 2.0
_ORDERS, _WATCH = "orders", "watch"


class RankLostError(RuntimeError):
    """Another rank has failed or is gone; the message says which, and why."""


class RankDriver:
    """The connection of an engine's first rank to its others.

    Attributes:
        is_awaited: whether the program waits for a step, or for the engine to be built. If it still
            does `_LAST_SECONDS` after another rank was lost, the process ends.
        stages: of this rank's start.

    Args:
        store: where the ranks have met.
        environment: this rank's.
        cards: of all ranks.
        size: ranks of an engine; there may be several that share the experts.
        launched: the ranks that this process has started.
    """

    def __init__(
        self,
        store: Store,
        environment: RankEnvironment,
        cards: Sequence[RankCard],
        size: int,
        device: torch.device,
        launched: Launched | None,
    ) -> None:
        self._store = store  # which lives as long as something holds it
        self._launched = launched
        self._is_closed = False
        self._exiting: threading.Timer | None = None
        self._num_steps = 0
        self.is_awaited = True
        self.stages = Stages()
        host = own_address(environment)
        first = environment.rank
        me, *others = cards[first : first + size]
        local = {card.rank: card.pid for card in others if card.machine == me.machine}
        remote = [card.rank for card in others if card.rank not in local]
        self._publisher = Publisher.create(list(local), remote, host)
        self._watch = RankWatch(
            host,
            [*local, *remote],
            self._on_failure,
            local_pids=local,
            count_steps=lambda: self._num_steps,
            stages=self.stages,
        )
        self._process_groups = ProcessGroups(store, host)
        try:
            store.set(f"{_ORDERS}/{first}", self._publisher.address.encode().decode())
            store.set(f"{_WATCH}/{first}", self._watch.address.encode().decode())
            self.groups = _parallel_groups(self._process_groups, environment, cards, size, device)
            self._publisher.wait_connected(_CONNECT_SECONDS)
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        # A program that just ends is no failure.
        atexit.register(self.close)

    def publish(self, data: bytes) -> None:
        """Send to all other ranks, in order.

        Raises:
            ChannelError: when one of them is gone.
        """
        self._num_steps += 1
        self._publisher.send(data)

    @property
    def lost(self) -> str | None:
        """Why another rank is lost, as far as it is known now."""
        failure = self._watch.failure
        return None if failure is None else self._describe(failure)

    @property
    def awaited(self) -> list[str]:
        """What each rank does that is not as far in its start as this one, one phrase each."""
        return self._watch.awaited

    def failure(self) -> str | None:
        """Why another rank was lost, after waiting briefly for the cause; None if none was."""
        end = time.monotonic() + _CAUSE_SECONDS
        while self._watch.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.lost

    def close(self, cause: str | None = None) -> None:
        """End the other ranks, because of `cause` or as it should be.

        What holds graphs must be gone before an orderly end.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._publisher.close()
        self._watch.close(cause)
        if self._exiting is not None:
            self._exiting.cancel()
        if self._launched is not None:
            self._launched.close()
        self._process_groups.abort(_ABORT_SECONDS if cause is None else 0)

    def _describe(self, failure: RankFailure) -> str:
        words = None if self._launched is None else self._launched.last_words(failure.rank)
        said = "" if words is None or failure.how == "raised" else f"; its last words: {words}"
        return failure.describe() + said

    def _on_failure(self, failure: RankFailure) -> None:
        """End what waits for the lost rank; the step in progress then fails.

        A kernel that spins for another rank's does not, nor gloo while the other is silent.
        """
        self._exiting = _after(_LAST_SECONDS, partial(self._give_up, failure))
        if failure.how == "silent" and failure.is_local and failure.pid is not None:
            # Gloo waits for a process that is stopped, and not for one that is gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(failure.pid, signal.SIGKILL)
        self._publisher.close()
        if self._launched is not None:
            self._launched.kill()
        self._process_groups.abort()

    def _give_up(self, failure: RankFailure) -> None:
        if self.is_awaited and not self._is_closed:
            logger.critical(
                "%s, and this rank still waits for it; it ends", self._describe(failure)
            )
            _exit(1)


class RankFollower:
    """Another rank's connection to the first of its engine; see `RankDriver` for the arguments.

    Attributes:
        stages: of this rank's start.
    """

    def __init__(
        self,
        store: Store,
        environment: RankEnvironment,
        cards: Sequence[RankCard],
        size: int,
        device: torch.device,
    ) -> None:
        rank = environment.rank
        first = cards[rank - rank % size]
        end = time.monotonic() + _CONNECT_SECONDS
        is_local = cards[rank].machine == first.machine
        self._failure: RankFailure | None = None
        self._has_ended = False
        self._exiting: threading.Timer | None = None
        self._num_steps = 0
        self.stages = Stages()
        orders = await_key(store, f"{_ORDERS}/{first.rank}", end)
        self._subscriber = Subscriber.connect(Address.decode(orders), rank)
        self._process_groups = ProcessGroups(store, own_address(environment))
        self._reporter = RankReporter(
            WatchAddress.decode(await_key(store, f"{_WATCH}/{first.rank}", end)),
            rank,
            self._on_rank0_gone,
            rank0_pid=first.pid if is_local else None,
            count_steps=lambda: self._num_steps,
            stages=self.stages,
        )
        self.groups = _parallel_groups(self._process_groups, environment, cards, size, device)

    def receive(self) -> bytes | None:
        """What rank 0 published next; None when it has ended as it should.

        Raises:
            RankLostError: when it has failed, or is gone.
        """
        try:
            data = self._subscriber.receive()
            self._num_steps += 1
            return data
        except ChannelClosedError:
            end = time.monotonic() + _CAUSE_SECONDS
            while self._failure is None and time.monotonic() < end and not self._has_ended:
                time.sleep(0.02)
        if self._failure is not None:
            raise RankLostError(self._failure.describe())
        return None

    def failed(self, cause: str) -> None:
        """Tell rank 0 that this rank cannot go on."""
        self._reporter.failed(cause)

    def close(self) -> None:
        self._reporter.close()
        self._subscriber.close()
        self._process_groups.abort()
        if self._exiting is not None:
            self._exiting.cancel()

    def _on_rank0_gone(self, failure: RankFailure | None) -> None:
        # This rank may wait for a kernel, or in a collective of gloo, which cannot be ended.
        status = 0 if failure is None else 1
        self._exiting = _after(_LAST_SECONDS, partial(_exit, status))
        self._failure = failure
        self._has_ended = True
        if failure is not None:
            self._subscriber.close()
            self._process_groups.abort()


def _after(seconds: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def _exit(status: int) -> None:
    os._exit(status)


def _set_up_nccl(address: str) -> None:
    """Defaults for NCCL and RCCL, unless the user has set them.

    Args:
        address: of this machine, as the other ranks reach it.
    """
    if (interface := interface_of(address)) is not None:
        set_default("NCCL_SOCKET_IFNAME", f"={interface}")
    # The watch finds out why a collective failed, which torch would end the process for.
    set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # Torch would record every collective.
    set_default("TORCH_FR_BUFFER_SIZE", "0")


def _parallel_groups(
    handles: ProcessGroups,
    environment: RankEnvironment,
    cards: Sequence[RankCard],
    size: int,
    device: torch.device,
) -> ParallelGroups:
    rank, world_size = environment.rank, environment.world_size
    engine, number = divmod(rank, size)
    if device.type == "cuda":
        _set_up_nccl(own_address(environment))
    tp = handles.of_device_tensors(f"tensor/{engine}", number, size, device)
    tp_cpu = handles.of_host_tensors(f"control/{engine}", number, size)
    ep = dp_cpu = SINGLE
    if world_size > size:
        ep = handles.of_device_tensors("experts", rank, world_size, device)
        if number == 0:
            dp_cpu = handles.of_host_tensors("engines", engine, world_size // size)
    return ParallelGroups(
        tp=tp,
        tp_cpu=tp_cpu,
        ep=ep,
        dp_cpu=dp_cpu,
        local_rank=environment.local_rank,
        num_local=sum(card.machine == cards[rank].machine for card in cards),
    )
