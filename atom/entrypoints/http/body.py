"""Request bodies: read within a limit, then validated with errors that name the field.

Reading belongs to the event loop, validating may be done by a thread.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from atom.entrypoints.http.errors import (
    SERVER_ERROR,
    ApiError,
    bad_request,
)
from atom.entrypoints.http.json_budget import JsonBudget
from atom.entrypoints.http.unknown_fields import (
    UNKNOWN_FIELD,
    UNSUPPORTED_CONTENT,
    UNSUPPORTED_FIELD,
    UnknownFields,
)
from atom.quoting import excerpt, quote

Body = TypeVar("Body", bound=BaseModel)

# An oversized upload is read on and thrown away this far, so that a client that writes
# before it reads gets the answer; past that the connection is simply closed.
MAX_DISCARDED_BYTES = 64 * 2**20
DISCARD_SECONDS = 5.0

# Of all requests together.
MAX_HELD_BYTES = 512 * 2**20
# Bodies are held until their requests are understood.
RETRY_AFTER_SECONDS = 1

# Beyond this many, spelling the problems out costs more than it helps.
MAX_PROBLEMS = 1000
MAX_REPORTED_PROBLEMS = 3

_MAY_BE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
# In JSON text: whole pairs and other escapes, so that `half` is half of a surrogate pair.
_SURROGATES = re.compile(
    rb"\\(?:[^u]|u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2}))"
)

# What pydantic adds to a location to tell the members of a union apart.
UNION_TAGS = frozenset({"str", "dict[str,any]", "list[str]", "list[ContentPart]"})


class BodyRoom:
    """The memory that all bodies share while they are read and worked on."""

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """A function that takes so many more bytes; all are given back at the end.

        Raises:
            ApiError: 503 when the function finds no room.
        """
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self.num_bytes + num_bytes > self._max_bytes:
                raise ApiError(
                    503,
                    f"the bodies of all requests together exceed {self._max_bytes} bytes; try "
                    "again later",
                    kind=SERVER_ERROR,
                    code="too_busy",
                    headers={"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
                )
            taken += num_bytes
            self.num_bytes += num_bytes

        try:
            yield take
        finally:
            self.num_bytes -= taken


async def read_body(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """Read one JSON body.

    Args:
        take: asked for room before bytes are kept, see `BodyRoom`.

    Raises:
        ApiError: 413 beyond `max_bytes`, 415 for another content type and for what is compressed,
            and what `take` raises.
    """
    data = await _read_bytes(request, max_bytes, take)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking, past CORS.
    if media_type != "application/json":
        raise ApiError(
            415,
            f"the content type must be application/json, got {excerpt(media_type) or 'none'}",
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"bodies are read as they are, without the content encoding {excerpt(encoding)}",
            code="unsupported_media_type",
        )
    return data


def parse_body(data: bytes, model: type[Body], unknown: UnknownFields) -> Body:
    """Validate a body; its unknown fields are left to `unknown`.

    Half of a surrogate pair is no text; clients that cut a text within one send it escaped, and it
    becomes U+FFFD.

    Raises:
        ApiError: 400 for what is not valid JSON, not the expected shape, or too much.
    """
    JsonBudget().spend(data)
    try:
        if _MAY_BE_HALF.search(data):
            data = _SURROGATES.sub(_whole_pair, data)
        body = model.model_validate_json(data)
    except ValidationError as error:
        raise describe(error) from None
    unknown.take(body)
    return body


def _whole_pair(escape: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if escape["half"] else escape[0]


async def _read_bytes(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    stream = request.stream()
    declared = request.headers.get("content-length", "")
    # Of more digits than any size has, the first are enough.
    size = 0 if not declared.isdecimal() else int(declared[:21])
    too_large = size > max_bytes
    data = bytearray()
    while not too_large:
        chunk = await anext(stream, None)
        if chunk is None:
            return bytes(data)
        take(len(chunk))
        data += chunk
        too_large = len(data) > max_bytes
    data.clear()
    # Clients that write to the end before they read get to see the answer.
    if "expect" not in request.headers and size <= max_bytes + MAX_DISCARDED_BYTES:
        await _discard(stream)
    raise ApiError(
        413,
        f"the request body is larger than the {max_bytes} bytes that this server takes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


async def _discard(stream: Any) -> None:
    async def drain() -> None:
        left = MAX_DISCARDED_BYTES
        async for chunk in stream:
            left -= len(chunk)
            if left < 0:
                return

    try:
        await asyncio.wait_for(drain(), DISCARD_SECONDS)
    except asyncio.TimeoutError:
        return


def describe(error: ValidationError) -> ApiError:
    """Say what is wrong with the first offending field."""
    if error.error_count() > MAX_PROBLEMS:
        return bad_request(f"the body has {error.error_count()} wrong fields")
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return bad_request(
            f"the body is not valid JSON: {excerpt(first['msg'])}", code="invalid_json"
        )
    if first["type"] == UNSUPPORTED_FIELD:
        name = _path((*first["loc"], first["ctx"]["field"]))
        return bad_request(f"{name} is not supported by this server", name, UNSUPPORTED_FIELD)
    if first["type"] == UNSUPPORTED_CONTENT:
        name = _path(first["loc"])
        content = error.errors(include_url=False)[0]["input"]
        kind = content.get("type") if isinstance(content, dict) else None
        is_of = f" is of type {quote(kind)}" if isinstance(kind, str) else ""
        return bad_request(f"{name}{is_of}: {excerpt(first['msg'])}", name, UNSUPPORTED_CONTENT)
    if not first["loc"]:
        return bad_request(
            f"the body must be a JSON object: {excerpt(first['msg'])}", code="invalid_type"
        )
    if first["type"] == "extra_forbidden":
        name = _path(first["loc"])
        return bad_request(f"{name} is not a field that this server knows", name, UNKNOWN_FIELD)
    if first["type"] == "missing":
        name = _path(first["loc"])
        return bad_request(f"{name} is missing", name, "missing_field")
    same = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    said = dict.fromkeys(f"{_path(p['loc'])}: {excerpt(p['msg'])}" for p in same)
    text = "; or ".join([*said][:MAX_REPORTED_PROBLEMS])
    return bad_request(text, _path(first["loc"][:1]), "invalid_type")


def _path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content", "str")` as `messages[0].content`."""
    text = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in UNION_TAGS and not part.startswith("<"):
            text += f".{part}"
    return excerpt(text)
