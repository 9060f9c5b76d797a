"""What connects ranks that have met: groups, the channel of orders, and the watch."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence

import torch

from atom.distributed.broadcast import Address, Publisher, Subscriber
from atom.distributed.channel import ChannelClosedError
from atom.distributed.groups import ProcessGroups
from atom.distributed.heartbeats import RankFailure, WatchAddress
from atom.distributed.launch import Launched
from atom.distributed.parallel_state import SINGLE
from atom.distributed.place import Place
from atom.distributed.rank_environment import RankEnvironment, is_loopback
from atom.distributed.rendezvous import RankCard
from atom.distributed.reporter import RankReporter
from atom.distributed.store import Store, await_key, own_address
from atom.distributed.watch import RankWatch
from atom.environment import set_default

logger = logging.getLogger(__name__)

# To connect, once all have met.
_CONNECT_SECONDS = 60.0
# A failure shows on several ranks; for the watch to find out where it began.
_CAUSE_SECONDS = 1.5
# What waits in a collective for a rank that is gone may be beyond help.
_LAST_SECONDS = 10.0
_ORDERS, _WATCH = "orders", "watch"


class RankLostError(RuntimeError):
    """Another rank has failed or is gone; the message says which, and why."""


class RankDriver:
    """The connection of an engine's first rank to its others.

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
        host = own_address(environment)
        first = environment.rank
        me, *others = cards[first : first + size]
        local = {card.rank: card.pid for card in others if card.machine == me.machine}
        remote = [card.rank for card in others if card.rank not in local]
        self._publisher = Publisher.create(list(local), remote, host)
        self._watch = RankWatch(host, [*local, *remote], self._on_failure, local_pids=local)
        self._groups = ProcessGroups(store, host)
        try:
            store.set(f"{_ORDERS}/{first}", self._publisher.address.encode().decode())
            store.set(f"{_WATCH}/{first}", self._watch.address.encode().decode())
            self.place = _place(self._groups, environment, cards, size, device)
            self._publisher.wait_connected(_CONNECT_SECONDS)
        except BaseException:
            self.close()
            raise
        # A program that just ends is no failure.
        atexit.register(self.close)

    def publish(self, data: bytes) -> None:
        """Send to all other ranks, in order.

        Raises:
            ChannelError: when one of them is gone.
        """
        self._publisher.send(data)

    @property
    def lost(self) -> str | None:
        """Why another rank is lost, as far as it is known now."""
        failure = self._watch.failure
        return None if failure is None else self._describe(failure)

    def failure(self) -> str | None:
        """Why another rank was lost, after waiting briefly for the cause; None if none was."""
        end = time.monotonic() + _CAUSE_SECONDS
        while self._watch.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.lost

    def close(self) -> None:
        """End the other ranks."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._publisher.close()
        self._watch.close()
        self._groups.abort()
        if self._launched is not None:
            self._launched.close()

    def _describe(self, failure: RankFailure) -> str:
        words = None if self._launched is None else self._launched.last_words(failure.rank)
        said = "" if words is None or failure.how == "raised" else f"; its last words: {words}"
        return failure.describe() + said

    def _on_failure(self, failure: RankFailure) -> None:
        """End what waits for the lost rank; the step in progress then fails."""
        if failure.how == "silent" and failure.is_local and failure.pid is not None:
            # Gloo waits for a process that is stopped, and not for one that is gone.
            with contextlib.suppress(ProcessLookupError):
                os.kill(failure.pid, signal.SIGKILL)
        if self._launched is not None:
            self._launched.kill()
        self._groups.abort()
        self._publisher.close()


class RankFollower:
    """Another rank's connection to the first of its engine; see `RankDriver` for the arguments."""

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
        orders = await_key(store, f"{_ORDERS}/{first.rank}", end)
        self._subscriber = Subscriber.connect(Address.decode(orders), rank)
        self._groups = ProcessGroups(store, own_address(environment))
        self._reporter = RankReporter(
            WatchAddress.decode(await_key(store, f"{_WATCH}/{first.rank}", end)),
            rank,
            self._on_rank0_gone,
            rank0_pid=first.pid if is_local else None,
        )
        self.place = _place(self._groups, environment, cards, size, device)

    def receive(self) -> bytes | None:
        """What rank 0 published next; None when it has ended as it should.

        Raises:
            RankLostError: when it has failed, or is gone.
        """
        try:
            return self._subscriber.receive()
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
        self._groups.abort()

    def _on_rank0_gone(self, failure: RankFailure | None) -> None:
        self._has_ended = True
        if failure is None:
            return
        self._failure = failure
        self._groups.abort()
        self._subscriber.close()
        # A collective of gloo cannot be ended when the other side is silent.
        timer = threading.Timer(_LAST_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()


def _place(
    groups: ProcessGroups,
    environment: RankEnvironment,
    cards: Sequence[RankCard],
    size: int,
    device: torch.device,
) -> Place:
    rank, world_size = environment.rank, environment.world_size
    engine, number = divmod(rank, size)
    if is_loopback(environment.master_addr):
        # Nothing of one machine's ranks listens where others could connect.
        set_default("NCCL_SOCKET_IFNAME", "lo")
    tensor = groups.of_device_tensors(f"tensor/{engine}", number, size, device)
    control = groups.of_host_tensors(f"control/{engine}", number, size)
    experts = engines = SINGLE
    if world_size > size:
        experts = groups.of_device_tensors("experts", rank, world_size, device)
        if number == 0:
            engines = groups.of_host_tensors("engines", engine, world_size // size)
    return Place(
        tensor=tensor,
        control=control,
        experts=experts,
        engines=engines,
        local_rank=environment.local_rank,
        num_local=sum(card.machine == cards[rank].machine for card in cards),
    )
