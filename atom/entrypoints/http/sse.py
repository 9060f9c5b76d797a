"""Server-sent events: encoding, and a response that ends when its reader does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atom.entrypoints.http.errors import ApiError, as_api_error

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def encode_event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(data) + b"\n\n"


def encode_named_event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\n".encode() + encode_event(data)


def encode_error(error: ApiError) -> bytes:
    return encode_event(error.body())


class EventStream(Response):
    """Sends `first`, then `events` as they come.

    When the client leaves, `events` is closed at once. When `events` fails, the stream ends
    with what `encode_failure` makes of the error, and without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        encode_failure: Callable[[ApiError], bytes] = encode_error,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length is not known.
        self.raw_headers = [h for h in self.raw_headers if h[0] != b"content-length"]
        self._first = first
        self._events = events
        self._encode_failure = encode_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        async with aclosing(self._events):
            pump = asyncio.create_task(self._pump(send))
            watcher = asyncio.create_task(wait_disconnected(receive))
            try:
                await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
            finally:
                await cancel(pump, watcher)

    async def _pump(self, send: Send) -> None:
        async def say(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await say(self._first)
        try:
            async for data in self._events:
                await say(data)
        except Exception as error:
            await say(self._encode_failure(as_api_error(error)))
        await say(b"", more=False)


async def wait_disconnected(receive: Receive) -> None:
    """Return when the client has gone away; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait until they have ended, whatever became of them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
