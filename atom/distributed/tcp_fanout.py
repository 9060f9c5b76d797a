"""A broadcast to ranks on other machines, over one ZMQ connection each.

A reader says `Hello` when it connects and how many messages it has read after each; so the writer
knows how far behind it is. A message has two frames, its number and its bytes; the last one has
no frame of bytes.
"""

from __future__ import annotations

import hmac
import logging
import math
import threading
from collections.abc import Sequence

import msgspec
import zmq

from atom.distributed.channel import (
    NAP_SECONDS,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    Wait,
)
from atom.distributed.tcp_socket import bind_tcp, create_socket

logger = logging.getLogger(__name__)

# How many messages a reader may be behind.
MOST_UNREAD = 16
# At the end: for messages that are still to be sent.
_LINGER_MS = 2000


class Hello(msgspec.Struct, frozen=True, tag=True):
    token: bytes
    rank: int


class Read(msgspec.Struct, frozen=True, tag=True):
    """How many messages the reader has read."""

    count: int


_decode = msgspec.msgpack.Decoder(Hello | Read).decode
_encode = msgspec.msgpack.Encoder().encode


class TcpWriter:
    """Binds a port and writes to the `ranks` that connect to it.

    Args:
        host: a name or address of this machine.
        token: what a reader must know.

    Raises:
        ChannelError: when no port of `host` can be bound.
    """

    def __init__(self, host: str, token: bytes, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._token = token
        self._context = zmq.Context()
        self._socket = create_socket(self._context, zmq.ROUTER)
        # Sending to a reader that is gone raises EHOSTUNREACH, and is not ignored.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.endpoint = bind_tcp(self._socket, host)
        except ChannelError:
            self._context.destroy(linger=0)
            raise
        self._rank_of: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}
        self._read = dict.fromkeys(ranks, 0)
        self._number = 0

    def unconnected(self) -> list[int]:
        """The ranks that have not said hello yet."""
        self._receive()
        return [rank for rank in self._read if rank not in self._identities]

    def write(self, data: bytes, wait: Wait, closing: threading.Event) -> None:
        """Send a message to all, as soon as each is close enough behind.

        Raises:
            ChannelTimeoutError: when a reader does not connect or read in time.
            ChannelClosedError: when a reader has left, or this side closes meanwhile.
        """
        for rank in self._read:
            self._wait_for(rank, wait, closing)
        self._number += 1
        for rank in self._read:
            self._send(rank, [self._number.to_bytes(8, "little"), data])

    def close(self) -> None:
        """Tell the readers, who still get what was written, and wait for it a little."""
        for rank in self._identities:
            try:
                self._send(rank, [(self._number + 1).to_bytes(8, "little")])
            except ChannelClosedError:
                continue  # it left before
        self._context.destroy(linger=_LINGER_MS)

    def _wait_for(self, rank: int, wait: Wait, closing: threading.Event) -> None:
        wait.restart()
        self._receive()
        while rank not in self._identities or self._number - self._read[rank] >= MOST_UNREAD:
            if closing.is_set():
                raise ChannelClosedError("the channel was closed while readers were waited for")
            if wait.is_over:
                raise ChannelTimeoutError(self._describe(rank))
            self._socket.poll(math.ceil(1000 * wait.limit(NAP_SECONDS)))
            self._receive()

    def _describe(self, rank: int) -> str:
        if rank not in self._identities:
            return f"rank {rank} has not connected to {self.endpoint} in time"
        return f"rank {rank} does not read: {self._number - self._read[rank]} messages wait for it"

    def _send(self, rank: int, frames: list[bytes]) -> None:
        try:
            # Frames are not copied: the connections share the bytes.
            self._socket.send_multipart([self._identities[rank], *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise ChannelClosedError(f"rank {rank} has left the channel") from error

    def _receive(self) -> None:
        """Handle all that readers have said so far."""
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(identity, _decode(b"".join(frames)))
            except msgspec.DecodeError:
                logger.warning("%s got bytes that no rank sends; ignored", self.endpoint)

    def _handle(self, identity: bytes, message: Hello | Read) -> None:
        match message:
            case Hello(token, rank):
                if not hmac.compare_digest(token, self._token) or rank not in self._read:
                    logger.warning("%s got a hello of a stranger; ignored", self.endpoint)
                elif rank in self._identities:
                    raise ChannelError(
                        f"two processes have connected to the channel as rank {rank}"
                    )
                else:
                    self._rank_of[identity] = rank
                    self._identities[rank] = identity
            case Read(count):
                if identity in self._rank_of:
                    self._read[self._rank_of[identity]] = count


class TcpReader:
    """Connects to a `TcpWriter` as `rank`."""

    def __init__(self, endpoint: str, token: bytes, rank: int) -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket = create_socket(self._context, zmq.DEALER)
        self._socket.connect(endpoint)
        self._socket.send(_encode(Hello(token, rank)))
        self._number = 0

    def read(self, wait: Wait, closing: threading.Event) -> bytes:
        """The next message.

        Raises:
            ChannelTimeoutError: when none comes in time.
            ChannelClosedError: when the writer, or this side, has closed.
            ChannelError: when messages were lost, because the connection broke.
        """
        while not self._socket.poll(0):
            if closing.is_set():
                raise ChannelClosedError("the channel was closed while a message was waited for")
            if wait.is_over:
                raise ChannelTimeoutError(f"nothing came from {self._endpoint} in time")
            self._socket.poll(math.ceil(1000 * wait.limit(NAP_SECONDS)))
        number, *body = self._socket.recv_multipart()
        self._number += 1
        if int.from_bytes(number, "little") != self._number:
            raise ChannelError(f"the connection to {self._endpoint} broke, and messages were lost")
        if not body:
            raise ChannelClosedError("rank 0 has closed the channel")
        self._socket.send(_encode(Read(self._number)))
        return body[0]

    def close(self) -> None:
        self._context.destroy(linger=0)
