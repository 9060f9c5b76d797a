"""What connects ranks that have met: groups, the channel of orders, and the watch."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import torch

from atom.distributed.broadcast import Address, Publisher, Subscriber
from atom.distributed.channel import ChannelClosedError
from atom.distributed.groups import ProcessGroups
from atom.distributed.heartbeats import RankFailure, WatchAddress
from atom.distributed.launch import Launched
from atom.distributed.place import Place
from atom.distributed.rank_environment import RankEnvironment, is_loopback
from atom.distributed.rendezvous import RankCard
from atom.distributed.reporter import RankReporter
from atom.distributed.seat import Seat
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
    """Rank 0's connection to the others.

    Args:
        store: where the ranks have met.
        cards: of all ranks.
        launched: the ranks that this process has started.
        seat: the engine's, among those that share the experts; None when none do.
    """

    def __init__(
        self,
        store: Store,
        environment: RankEnvironment,
        cards: Sequence[RankCard],
        device: torch.device,
        launched: Launched | None,
        seat: Seat | None = None,
    ) -> None:
        self._store = store  # which lives as long as something holds it
        self._launched = launched
        self._is_closed = False
        host = own_address(environment)
        others = [card for card in cards if card.rank != 0]
        local = {card.rank: card.pid for card in others if card.machine == cards[0].machine}
        remote = [card.rank for card in others if card.rank not in local]
        self._publisher = Publisher.create(list(local), remote, host)
        store.set(_ORDERS, self._publisher.address.encode().decode())
        self._watch = RankWatch(host, [*local, *remote], self._on_failure, local_pids=local)
        store.set(_WATCH, self._watch.address.encode().decode())
        self._groups = ProcessGroups(store, host)
        self.place = _place(self._groups, environment, cards, device)
        if seat is not None:
            # Which lives as long as something holds it.
            self._meeting = seat.open_store(environment.rank)
            self.place = seat.join(self.place, self._groups.at(self._meeting), device)
        self._publisher.wait_connected(_CONNECT_SECONDS)

    def publish(self, data: bytes) -> None:
        """Send to all other ranks, in order.

        Raises:
            ChannelError: when one of them is gone.
        """
        self._publisher.send(data)

    def failure(self) -> str | None:
        """Why another rank was lost, after waiting briefly for the cause; None if none was."""
        end = time.monotonic() + _CAUSE_SECONDS
        while (failure := self._watch.failure) is None and time.monotonic() < end:
            time.sleep(0.02)
        return None if failure is None else self._describe(failure)

    def close(self) -> None:
        """End the other ranks."""
        if self._is_closed:
            return
        self._is_closed = True
        self._publisher.close()
        self._watch.close()
        self._groups.abort()
        if self._launched is not None:
            self._launched.close()

    def _describe(self, failure: RankFailure) -> str:
        words = None if self._launched is None else self._launched.last_words(failure.rank)
        said = "" if words is None or failure.how == "raised" else f"; its last words: {words}"
        return failure.describe() + said

    def _on_failure(self, _: RankFailure) -> None:
        """End what waits for the lost rank; the step in progress then fails."""
        if self._launched is not None:
            self._launched.kill()
        self._groups.abort()
        self._publisher.close()


class RankFollower:
    """Another rank's connection to rank 0; the arguments are those of `RankDriver`."""

    def __init__(
        self,
        store: Store,
        environment: RankEnvironment,
        cards: Sequence[RankCard],
        device: torch.device,
        seat: Seat | None = None,
    ) -> None:
        rank, first = environment.rank, cards[0]
        end = time.monotonic() + _CONNECT_SECONDS
        is_local = cards[rank].machine == first.machine
        self._failure: RankFailure | None = None
        self._has_ended = False
        self._subscriber = Subscriber.connect(Address.decode(await_key(store, _ORDERS, end)), rank)
        self._groups = ProcessGroups(store, own_address(environment))
        self._reporter = RankReporter(
            WatchAddress.decode(await_key(store, _WATCH, end)),
            rank,
            self._on_rank0_gone,
            rank0_pid=first.pid if is_local else None,
        )
        self.place = _place(self._groups, environment, cards, device)
        if seat is not None:
            # Which lives as long as something holds it.
            self._meeting = seat.open_store(environment.rank)
            self.place = seat.join(self.place, self._groups.at(self._meeting), device)

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
    device: torch.device,
) -> Place:
    rank, size = environment.rank, environment.world_size
    if is_loopback(environment.master_addr):
        # Nothing of one machine's ranks listens where others could connect.
        set_default("NCCL_SOCKET_IFNAME", "lo")
    return Place(
        tensor=groups.of_device_tensors("tensor", rank, size, device),
        control=groups.of_host_tensors("control", rank, size),
        local_rank=environment.local_rank,
        num_local=sum(card.machine == cards[rank].machine for card in cards),
    )
