"""The outermost layer: one spelling of methods and paths, and headers of every answer."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom.entrypoints.http.unknown_fields import IGNORED_FIELDS_HEADER, UnknownFields

REQUEST_ID_HEADER = "x-request-id"
EXPOSED_HEADERS = (REQUEST_ID_HEADER, IGNORED_FIELDS_HEADER)

# What is sent back, and may be logged, holds nothing that means something there.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/@=+-]{1,128}")


class EdgeMiddleware:
    """HEAD is GET whose body the server leaves out, and a slash at the end of a path is none.

    Every answer has `X-Request-Id`: the client's where it is short and plain, else a new one. It
    names the fields that were ignored, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                unknown: UnknownFields | None = state.get("unknown_fields")
                headers.update(unknown.headers if unknown is not None else {})
            await send(message)

        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path = scope["path"].rstrip("/") or "/"
        await self._app({**scope, "method": method, "path": path}, receive, send_with_headers)
