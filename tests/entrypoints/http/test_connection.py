"""Connections: what a client may send before it has said what it wants, and how slowly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from patience import PATIENCE_SECONDS
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from atom.entrypoints.http import connection
from atom.entrypoints.http.connection import MAX_HEADER_BYTES, BoundedProtocol

pytestmark = pytest.mark.asyncio


class Served:
    """An application that echoes the size of bodies; `/wait` only ends with its client.

    Attributes:
        state: uvicorn's connections and tasks.
        left: requests whose client went away.
    """

    def __init__(self) -> None:
        self.state = ServerState()
        self.left: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
            while scope["path"] == "/wait":
                if (await receive())["type"] == "http.disconnect":
                    raise ClientDisconnect
        except ClientDisconnect:
            self.left.append(scope["path"])
            return
        await PlainTextResponse(str(len(body)))(scope, receive, send)


# Of the only host that a request may name.
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Served, int]]:
    served = Served()
    config = uvicorn.Config(served, lifespan="off", ws="none", log_config=None)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: BoundedProtocol(config, served.state, {}), "127.0.0.1", 0
    )
    try:
        yield served, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for open_connection in list(served.state.connections):
            open_connection.transport.abort()
        await asyncio.sleep(0)


async def answer(port: int, *parts: bytes, end: bool = False) -> bytes:
    """All that the server says to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = bytearray()

    async def listen() -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                said.extend(piece)

    listening = asyncio.create_task(listen())
    try:
        with suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.001)
            if end:
                writer.write_eof()
        await asyncio.wait_for(listening, PATIENCE_SECONDS)
        return bytes(said)
    finally:
        writer.close()


def status(said: bytes) -> int:
    found = re.match(rb"HTTP/1.1 (\d+) ", said)
    assert found is not None, said
    return int(found[1])


async def test_a_plain_request_is_answered() -> None:
    async with serving() as (_, port):
        said = await answer(port, GET + b"Connection: close\r\n\r\n")
        assert status(said) == 200
        chunked = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        said = await answer(port, chunked, *[b"1\r\na\r\n" * 20] * 50, b"0\r\n\r\n")
        assert said.endswith(b"\r\n\r\n1000")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET / HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost:\r\n", 200),
        (b"GET / HTTP/1.0\r\n", 200),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n", 400),
    ],
)
async def test_a_request_names_one_host(head: bytes, expected: int) -> None:
    async with serving() as (served, port):
        said = await answer(port, head + b"Connection: close\r\n\r\n")
        assert status(said) == expected
        assert (b"one Host header" in said) == (expected == 400)
        assert not served.state.connections


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"a" * 1000, id="one value"),
        pytest.param(b"\r\nx: " + b"a" * 995, id="many headers"),
    ],
)
async def test_headers_without_end_are_431(piece: bytes) -> None:
    async with serving() as (served, port):
        pieces = [piece] * (MAX_HEADER_BYTES // 1000 + 1)
        said = await answer(port, GET + b"x: ", *pieces)
        assert status(said) == 431
        assert b"application/json" in said
        assert not served.state.connections


async def test_complete_headers_are_counted_too() -> None:
    async with serving() as (_, port):
        for size, expected in ((MAX_HEADER_BYTES - 100, 200), (MAX_HEADER_BYTES, 431)):
            for form in (b"GET /?%s HTTP/1.1\r\nHost: a\r\n", GET + b"x: %s\r\n"):
                request = form % (b"a" * size) + b"Connection: close\r\n\r\n"
                assert status(await answer(port, request)) == expected
        # Each as if it were written with a space.
        many = GET + b"a:b\r\n" * (MAX_HEADER_BYTES // 6 + 9)
        assert len(many) < MAX_HEADER_BYTES
        assert status(await answer(port, many)) == 431


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"1;x=", id="chunk extension"),
        pytest.param(b"1\r\na\r\n0\r\nx: ", id="trailer"),
    ],
)
async def test_framing_without_end(start: bytes) -> None:
    async with serving() as (served, port):
        head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        pieces = [b"a" * 1000] * (MAX_HEADER_BYTES // 1000 + 1)
        assert status(await answer(port, head + start, *pieces)) == 431
        assert served.left == ["/"]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\r\n", id="an empty line"),
        pytest.param(GET + b"x:", id="part of the headers"),
        pytest.param(POST + b"Content-Length: 9\r\n\r\na", id="part of a body"),
        pytest.param(GET + b"\r\n" + GET + b"x:", id="part of a second request"),
    ],
)
async def test_what_never_arrives_is_408(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.2)
    async with serving() as (served, port):
        said = await answer(port, sent)
        assert status(said[said.rindex(b"HTTP/1.1") :]) == 408
        assert not served.state.connections


async def test_a_body_that_keeps_coming_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(connection, "MIN_BODY_BYTES", 1)
    checks = 0
    original = BoundedProtocol._check_arrival

    def counted(self: BoundedProtocol) -> None:
        nonlocal checks
        # What came meanwhile is in the kernel when the machine is busy; it counts.
        self._body_bytes += 1
        checks += 1
        original(self)

    monkeypatch.setattr(BoundedProtocol, "_check_arrival", counted)
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = POST + b"Connection: close\r\nContent-Length: 3\r\n\r\n"
        writer.write(head)
        while checks < 3:
            await asyncio.sleep(0.01)
        writer.write(b"abc")
        assert status(await reader.read()) == 200
        writer.close()


async def test_one_connection_too_many_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "max_connections", lambda: 2)
    async with serving() as (_, port):
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await answer(port) == b""
        for reader, writer in kept:
            writer.write(GET + b"Connection: close\r\n\r\n")
            assert status(await reader.read()) == 200
            writer.close()


async def test_connections_leave_room_for_other_files() -> None:
    assert 1 <= connection.max_connections() <= connection.MAX_CONNECTIONS


async def test_pipelined_requests_are_bounded_and_told_of_the_end() -> None:
    async with serving() as (served, port):
        one = b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n"
        said = await answer(port, one * (connection.MAX_PIPELINED + 2))
        assert status(said) == 429
        assert served.left == ["/wait"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(one * 2)
        while not served.state.tasks:
            await asyncio.sleep(0.01)
        writer.close()
        while served.state.tasks:
            await asyncio.sleep(0.01)
        assert served.left == ["/wait", "/wait"]
        assert await reader.read() == b""


async def test_a_reader_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.1)

    async def long_answer(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):  # far more than sockets hold
            await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    state = ServerState()
    config = uvicorn.Config(long_answer, lifespan="off", ws="none", log_config=None)
    server = await asyncio.get_running_loop().create_server(
        lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
    writer.write(GET + b"\r\n")
    while not state.tasks:
        await asyncio.sleep(0.01)
    (served,) = state.connections
    while state.connections:
        await asyncio.sleep(0.01)
    assert isinstance(served, BoundedProtocol)
    assert served._unread is None
    assert served._arrival is None
    writer.close()
    server.close()
    while state.tasks:
        await asyncio.sleep(0.01)
