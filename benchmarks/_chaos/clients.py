"""Clients that behave, and clients that do not, over plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from _chaos.answers import IncompleteError, said_by
from _chaos.patience import patient
from _chaos.plan import Ask

# An answer may take this long on a busy machine; a hang takes longer.
PATIENCE_SECONDS = 300.0
_STAGES = ("connected", "half the head", "the head", "half the body", "sent", "first byte", "later")


@dataclass
class Outcome:
    """What became of one request.

    Attributes:
        fault: what its client did.
        status: of the answer; None without one.
        said: of a complete answer; None otherwise.
        error: of an answer that is none, and of a connection that ended early.
        left: whether the client went away by itself.
        started: seconds, `time.monotonic()`.
    """

    ask: Ask
    fault: str
    status: int | None = None
    said: Any = None
    error: str | None = None
    left: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    started: float = 0.0
    seconds: float = 0.0


class Connection:
    """A connection whose client decides when what is sent and read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read_answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; what is cut raises `IncompleteReadError`."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = b"".join([piece async for piece in self._chunks()])
        return int(first.split()[1]), headers, body

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    def reset(self) -> None:
        """Close so that the other side sees an error, not an end."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connect(port: int, *, buffer: int | None = None) -> AsyncIterator[Connection]:
    """Args:
    buffer: bytes that the kernel takes from the server before anybody reads them.
    """
    sock = socket.socket()
    sock.setblocking(False)
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except BaseException:
        sock.close()
        raise
    limit = 2**16 if buffer is None else buffer
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask_once(port: int, ask: Ask, fault: str = "none") -> Outcome:
    """Send a request as one should, and read all of the answer."""
    async with connect(port) as connection:
        await connection.send(ask.encode())
        return await _read(connection, Outcome(ask, fault))


async def _read(connection: Connection, outcome: Outcome) -> Outcome:
    status, headers, body = await connection.read_answer()
    outcome.status, outcome.headers = status, headers
    if status != 200:
        outcome.error = _error_of(body)
        return outcome
    try:
        outcome.said = said_by(outcome.ask.path, body, stream=outcome.ask.stream)
    except IncompleteError as error:
        outcome.error = str(error)
    return outcome


def _error_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    return f"{error.get('code') or error['type']}: {error['message']}"


async def _in_pieces(port: int, asks: list[Ask], rng: random.Random) -> list[Outcome]:
    (ask,) = asks
    data = ask.encode()
    async with connect(port) as connection:
        while data:
            size = rng.choice([1, 7, 50, 300])
            await connection.send(data[:size])
            data = data[size:]
            await asyncio.sleep(rng.choice([0, 0.001, 0.01]))
        return [await _read(connection, Outcome(ask, "body in pieces"))]


async def _reused(port: int, asks: list[Ask], rng: random.Random) -> list[Outcome]:
    del rng
    outcomes = []
    async with connect(port) as connection:
        for ask in asks:
            await connection.send(ask.encode())
            outcomes.append(await _read(connection, Outcome(ask, "connection reused")))
    return outcomes


async def _pipelined(port: int, asks: list[Ask], rng: random.Random) -> list[Outcome]:
    del rng
    async with connect(port) as connection:
        await connection.send(b"".join(ask.encode() for ask in asks))
        return [await _read(connection, Outcome(ask, "pipelined")) for ask in asks]


async def _byte_a_second(port: int, asks: list[Ask], rng: random.Random) -> list[Outcome]:
    """For some seconds, and then the rest."""
    (ask,) = asks
    async with connect(port, buffer=2048) as connection:
        await connection.send(ask.encode())
        first = b""
        for _ in range(rng.randint(2, 5)):
            first += await connection.reader.readexactly(1)
            await asyncio.sleep(1)
        # What was read goes back before the rest.
        rest = asyncio.StreamReader()
        rest.feed_data(first)
        pump = asyncio.create_task(_pump(connection.reader, rest))
        slow = Connection(rest, connection.writer)
        try:
            return [await _read(slow, Outcome(ask, "reads a byte a second"))]
        finally:
            pump.cancel()


async def _pump(source: asyncio.StreamReader, into: asyncio.StreamReader) -> None:
    while data := await source.read(512):
        into.feed_data(data)
    into.feed_eof()


async def _stops_reading(port: int, asks: list[Ask], rng: random.Random) -> list[Outcome]:
    (ask,) = asks
    async with connect(port, buffer=2048) as connection:
        await connection.send(ask.encode())
        await asyncio.sleep(rng.uniform(0.5, 3))
        connection.reset()
    return [Outcome(ask, "stops reading, then resets", left=True)]


async def _vanishes(port: int, asks: list[Ask], rng: random.Random) -> list[Outcome]:
    (ask,) = asks
    stage = rng.choice(_STAGES)
    resets = rng.random() < 0.5
    outcome = Outcome(ask, f"vanishes: {stage}", left=True)
    data = ask.encode()
    head = data.index(b"\r\n\r\n") + 4
    sent = {"connected": 0, "half the head": head // 2, "the head": head}
    sent["half the body"] = (head + len(data)) // 2
    async with connect(port) as connection:
        await connection.send(data[: sent.get(stage, len(data))])
        if stage == "first byte":
            await connection.reader.read(1)
        elif stage == "later":
            await connection.reader.read(rng.randint(100, 1000))
        else:
            await asyncio.sleep(rng.choice([0, 0.01, 0.2]))
        if resets:
            connection.reset()
    return [outcome]


async def _plain(port: int, asks: list[Ask], rng: random.Random) -> list[Outcome]:
    del rng
    (ask,) = asks
    return [await ask_once(port, ask)]


Client = Callable[[int, list[Ask], random.Random], Awaitable[list[Outcome]]]

# Each with how many requests it sends.
PLAIN: tuple[Client, int] = (_plain, 1)
VANISHING: tuple[Client, int] = (_vanishes, 1)
SLOW: tuple[tuple[Client, int], ...] = (
    (_in_pieces, 1),
    (_byte_a_second, 1),
    (_stops_reading, 1),
    (_reused, 3),
    (_pipelined, 3),
)


async def run_client(
    client: tuple[Client, int], port: int, asks: list[Ask], rng: random.Random
) -> list[Outcome]:
    """Its outcomes; a connection that the server ends is one, too."""
    start = time.monotonic()
    try:
        outcomes = await asyncio.wait_for(client[0](port, asks, rng), patient(PATIENCE_SECONDS))
    except (OSError, asyncio.IncompleteReadError) as error:
        outcomes = [Outcome(ask, client[0].__name__, error=f"connection: {error}") for ask in asks]
    except (asyncio.TimeoutError, TimeoutError):
        outcomes = [Outcome(ask, client[0].__name__, error="HUNG") for ask in asks]
    for outcome in outcomes:
        outcome.started, outcome.seconds = start, time.monotonic() - start
    return outcomes
