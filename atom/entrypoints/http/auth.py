"""API keys: a bearer token, or `x-api-key`, guards every route but `/health` and the page."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.http.playground import PREFIX
from atom.entrypoints.server_options import ApiKey

OPEN_PATHS = frozenset({"/", "/health"})


def is_open(path: str) -> bool:
    """Whether a path needs no key: the playground asks for one itself."""
    return path in OPEN_PATHS or path.startswith(PREFIX)


class ApiKeyMiddleware:
    """Answers 401 to requests that send none of `api_keys`, and notes the others' names."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._digests = [(_digest(each.key.encode()), each.name) for each in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        if (name := self._name_of(scope)) is not None:
            scope.setdefault("state", {})["api_key"] = name
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response(scope["path"])(scope, receive, send)

    def _name_of(self, scope: Scope) -> str | None:
        """Whose key was sent; None without a valid one."""
        headers = Headers(scope=scope)
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        candidates = [headers.get("x-api-key", ""), bearer if kind.lower() == "bearer" else ""]
        given = [_digest(key.strip().encode("latin-1")) for key in candidates]  # headers' own bytes
        # Every key is compared, and digests of one length, so that time tells nothing.
        matches = [
            name if hmac.compare_digest(each, digest) else None
            for each in given
            for digest, name in self._digests
        ]
        return next((name for name in matches if name is not None), None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
