"""Connections that one client cannot hold for nothing: bounds on bytes, time and number."""

from __future__ import annotations

import asyncio
import resource
from typing import Any, NoReturn

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

# Of a request's line and headers together, and of what may come with no part of a body in it:
# the framing of chunks, their extensions, trailers.
MAX_HEADER_BYTES = 64 * 2**10
# From a connection's or a request's first moment to the end of its headers.
HEADER_SECONDS = 20.0
# A body that is not complete yet must grow by so many bytes in every such time.
BODY_SECONDS = 20.0
MIN_BODY_BYTES = 80 * 2**10
# Requests of one connection that wait for the answer before theirs.
MAX_PIPELINED = 16
# A client that takes nothing of an answer for so long has gone.
UNREAD_SECONDS = 120.0
# Fewer where the process may open fewer files.
MAX_CONNECTIONS = 4096
# Files besides connections: sockets of the engine, logs, libraries.
OTHER_FILES = 128

REFUSALS = {
    400: "this is not a valid HTTP/1.1 request, which has one Host header",
    408: "the request did not arrive in time",
    429: f"more than {MAX_PIPELINED} requests wait on this connection",
    431: f"the request line and headers are larger than {MAX_HEADER_BYTES} bytes",
}


def max_connections() -> int:
    """How many connections the server keeps at a time; further ones are closed at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - OTHER_FILES))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the bounds above.

    What exceeds them is answered with 431 or 408 while no other answer is under way, and the
    connection is closed. So is, with 400, a request without its one Host header (RFC 9112, 3.2),
    which HTTP/1.0 may leave out.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._max_connections = max_connections()
        self._refusal = 400
        # Of the line and headers of the request that is being read.
        self._header_bytes = 0
        # Since the last part of a body, or end of headers.
        self._idle_bytes = 0
        self._body_bytes = 0
        self._has_headers = False
        # Runs while a request is awaited or read.
        self._arrival: asyncio.TimerHandle | None = None
        # Runs while the client leaves an answer unread.
        self._unread: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.close()
        else:
            self._expect(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)
        self._disconnect()

    def data_received(self, data: bytes) -> None:
        if self._arrival is None:
            self._expect(HEADER_SECONDS)
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > MAX_HEADER_BYTES:
            self._refuse(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._has_headers = False
        self._expect(HEADER_SECONDS)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # A header is its name, ": ", its value and the end of the line.
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._stop_parser(400)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(429)
        self._idle_bytes = 0
        self._body_bytes = 0
        self._has_headers = True
        self._expect(BODY_SECONDS)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        del msg  # uvicorn's own words are no JSON
        self._refuse(self._refusal)

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            self._stop_parser(431)

    def _stop_parser(self, status: int) -> NoReturn:
        self._refusal = status
        raise ValueError(REFUSALS[status])  # the parser ends with `send_400_response`

    def _expect(self, seconds: float) -> None:
        self._stop_waiting()
        self._arrival = self.loop.call_later(seconds, self._check_arrival)

    def _check_arrival(self) -> None:
        # While reading is paused it is the server that lets the client wait.
        came = self._has_headers and self._body_bytes >= MIN_BODY_BYTES
        if self.flow.read_paused or came:
            self._body_bytes = 0
            self._expect(BODY_SECONDS)
        else:
            self._refuse(408)

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _watch_reader(self) -> None:
        self._stop_watching()
        left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self._check_reader, left)

    def _check_reader(self, unread_before: int) -> None:
        if self.transport.get_write_buffer_size() < unread_before:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _refuse(self, status: int) -> None:
        """Answer, unless another answer is under way, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if not any(c.response_started and not c.response_complete for c in self._cycles):
            self.transport.write(_refusal(status))
        self._disconnect()
        self.transport.close()

    def _disconnect(self) -> None:
        """Tell every request of this connection, pipelined ones too, that nobody reads."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()


def _refusal(status: int) -> bytes:
    error = {
        "message": REFUSALS[status],
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    body = msgspec.json.encode({"error": error})
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[status] + head % len(body) + body
