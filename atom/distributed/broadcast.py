"""Rank 0 sends messages to all other ranks, in order; nothing is lost and nothing pickled.

    publisher = Publisher.create(local=[1, 2, 3], remote=[4, 5], host=master_addr)   # rank 0
    store.set("orders", publisher.address.encode())
    publisher.wait_connected(60)
    publisher.send(data)

    subscriber = Subscriber.connect(Address.decode(store.get("orders")), rank)       # the others
    data = subscriber.receive(timeout_s=None)

Ranks on rank 0's machine read shared memory (`shared_ring.py`), the others TCP (`tcp_fanout.py`);
where there is no shared memory all do. Nothing is left behind however the processes end. The
network is trusted: messages are not encrypted, but only who knows the address gets them.

`close`, from any thread, ends a `send` or `receive` that waits: for the case that the other side
is stopped, or its machine gone, which `watch.py` notices. On one machine both notice by themselves
when the other is killed.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

import msgspec

from atom.distributed.channel import ChannelClosedError, ChannelError, ChannelTimeoutError, Wait
from atom.distributed.shared_memory import HAS_SHARED_MEMORY
from atom.distributed.shared_ring import RingReader, RingWriter
from atom.distributed.tcp_fanout import TcpReader, TcpWriter

_TOKEN_BYTES = 16


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a subscriber must know; secret.

    Attributes:
        token: random bytes that tell this channel from others.
        segment: path of the shared memory, for the `local` ranks; None without any.
        endpoint: ZMQ endpoint for the `remote` ranks; None without any.
    """

    token: bytes
    local: tuple[int, ...]
    remote: tuple[int, ...]
    segment: str | None
    endpoint: str | None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Address:
        return msgspec.json.decode(data, type=cls)


class Publisher:
    """Rank 0's side. An error of `send` is final: some ranks may have the message, others not.

    One message may be at most 16 ahead of the slowest reader, in shared memory 16 pieces of 64 KiB.
    """

    def __init__(self, token: bytes, ring: RingWriter | None, tcp: TcpWriter | None) -> None:
        self._writers = [writer for writer in (tcp, ring) if writer is not None]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.address = Address(
            token,
            tuple(ring.ranks) if ring else (),
            tuple(tcp.ranks) if tcp else (),
            ring.path if ring else None,
            tcp.endpoint if tcp else None,
        )

    @classmethod
    def create(
        cls, local: Sequence[int] = (), remote: Sequence[int] = (), host: str = "127.0.0.1"
    ) -> Publisher:
        """Create the shared memory and bind the port, where there are ranks for it.

        Args:
            local: the ranks on this machine, as the same user and in the same PID namespace.
            remote: the ranks elsewhere.
            host: a name or address of this machine that the remote ranks can reach.

        Raises:
            ChannelError: when there is no memory, or no port of `host` can be bound.
        """
        if not HAS_SHARED_MEMORY:
            local, remote = (), (*local, *remote)
        token = secrets.token_bytes(_TOKEN_BYTES)
        ring = RingWriter(token, local) if local else None
        try:
            tcp = TcpWriter(host, token, remote) if remote else None
        except ChannelError:
            if ring is not None:
                ring.close()
            raise
        return cls(token, ring, tcp)

    def wait_connected(self, timeout_s: float | None) -> None:
        """Wait until every rank has connected; `send` does not need it.

        Raises:
            ChannelTimeoutError: names the ranks that have not.
            ChannelClosedError: when `close` was called.
        """
        with self._lock:
            wait = Wait(timeout_s)
            while True:
                self._check_open()
                missing = sorted(rank for w in self._writers for rank in w.unconnected())
                if not missing:
                    return
                if not wait.pause():
                    ranks = ", ".join(map(str, missing))
                    raise ChannelTimeoutError(f"rank {ranks} did not connect in {timeout_s:g} s")

    def send(self, data: bytes, timeout_s: float | None = None) -> None:
        """Send a message of any size to every rank.

        Args:
            timeout_s: how long to wait for the slowest rank; None waits until `close`.

        Raises:
            ChannelTimeoutError: names the rank that has not read, or not connected.
            ChannelClosedError: when a rank has left, or `close` was called.
        """
        with self._lock:
            self._check_open()
            wait = Wait(timeout_s)
            try:
                for writer in self._writers:
                    writer.write(data, wait, self._closing)
            except ChannelError:
                self._closing.set()
                raise

    def close(self) -> None:
        """Release everything; the others get what was sent, and then `ChannelClosedError`."""
        self._closing.set()
        with self._lock:
            while self._writers:
                self._writers.pop().close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ChannelClosedError("the channel is closed")


class Subscriber:
    """The side of another rank."""

    def __init__(self, reader: RingReader | TcpReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_closed = False

    @classmethod
    def connect(cls, address: Address, rank: int) -> Subscriber:
        """Connect as `rank`, which only one process can do.

        Raises:
            ChannelError: when the shared memory cannot be mapped, or the rank is taken.
            ValueError: when the publisher does not know the rank.
        """
        if address.segment is not None and rank in address.local:
            index = address.local.index(rank)
            return cls(RingReader(address.segment, address.token, len(address.local), index))
        if address.endpoint is not None and rank in address.remote:
            return cls(TcpReader(address.endpoint, address.token, rank))
        raise ValueError(f"the channel is for ranks {address.local + address.remote}, not {rank}")

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; None waits until it comes or the channel is closed.

        Raises:
            ChannelTimeoutError: when none comes; `receive` can be called again.
            ChannelClosedError: when rank 0 has closed and all its messages were received, or when
                `close` was called.
        """
        with self._lock:
            if self._closing.is_set():
                raise ChannelClosedError("the channel is closed")
            return self._reader.read(Wait(timeout_s), self._closing)

    def close(self) -> None:
        """Leave: `send` of rank 0 raises from now on."""
        self._closing.set()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._reader.close()
