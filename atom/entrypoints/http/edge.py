"""The outermost layer: one spelling of methods and paths, and headers of every answer."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom import logs
from atom.entrypoints.http.unknown_fields import IGNORED_FIELDS_HEADER, UnknownFields
from atom.quoting import quote
from atom.text.observer import Caller

REQUEST_ID_HEADER = "x-request-id"
EXPOSED_HEADERS = (REQUEST_ID_HEADER, IGNORED_FIELDS_HEADER)

# What is sent back, and may be logged, holds nothing that means something there.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/@=+-]{1,128}")


_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

logger = logging.getLogger("atom.access")


def caller_of(request: Request) -> Caller:
    """Who sent a request that came through `EdgeMiddleware`."""
    parent = request.headers.get("traceparent", "")
    return Caller(
        request_id=request.state.request_id,
        key=request.state.api_key,
        trace_parent=parent if _TRACE_PARENT.fullmatch(parent) else None,
    )


class EdgeMiddleware:
    """HEAD is GET whose body the server leaves out, and a slash at the end of a path is none.

    Every answer has `X-Request-Id`: the client's where it is short and plain, else a new one. It
    names the fields that were ignored, too. The log has a line for each answer.

    Args:
        logs_requests: it has them at level `info`, otherwise at `debug`.
    """

    def __init__(self, app: ASGIApp, logs_requests: bool = False) -> None:
        self._app = app
        self._level = logging.INFO if logs_requests else logging.DEBUG

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["api_key"] = request_id, ""
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                unknown: UnknownFields | None = state.get("unknown_fields")
                headers.update(unknown.headers if unknown is not None else {})
            await send(message)

        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path = scope["path"].rstrip("/") or "/"
        start = time.monotonic()
        token = logs.request_id.set(request_id)
        try:
            await self._app({**scope, "method": method, "path": path}, receive, send_with_headers)
        finally:
            if logger.isEnabledFor(self._level):
                seconds = time.monotonic() - start
                fields = {
                    "api_key": state["api_key"],
                    "status": status,
                    "seconds": round(seconds, 6),
                }
                line = f"{scope['method']} {quote(scope['path'])}"
                logger.log(self._level, "%s", line, extra={logs.FIELDS: fields})
            logs.request_id.reset(token)
