"""What the handlers of every kind of model share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.chat.generation import unless_disconnected
from atom.entrypoints.http.body import BodyRoom, read_body
from atom.entrypoints.http.errors import ApiError, json_response
from atom.entrypoints.http.unknown_fields import UnknownFields
from atom.entrypoints.http.workers import Workers
from atom.entrypoints.server_options import MAX_BODY_BYTES, ServerOptions
from atom.quoting import quote
from atom.version import __version__

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class BaseApi:
    """Attributes:
    model_names: what requests may call the model; the first is what answers say.
    """

    options: ServerOptions
    workers: Workers
    room: BodyRoom
    model_names: tuple[str, ...]
    created: int

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def _prepared(
        self, request: Request, prepare: Callable[[bytes, UnknownFields], Result]
    ) -> Result:
        """What `prepare` makes of the body; of a large one it does so in a thread."""
        unknown = UnknownFields(self.options.unknown_fields == "refuse")
        request.state.unknown_fields = unknown
        with self.room.share() as take:
            data = await read_body(request, self._max_body_bytes, take)
            work = self._run(data, functools.partial(prepare, data, unknown))
            return await unless_disconnected(request, work)

    async def _run(self, data: bytes, work: Callable[[], Result]) -> Result:
        """The result of `work` on a body."""
        return await self.workers.run(len(data), work)

    @property
    def _max_body_bytes(self) -> int:
        return self.options.max_body_bytes or MAX_BODY_BYTES

    def _model(self, name: str | None) -> str:
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"the model {quote(name)} does not exist; this server has "
                f"{', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def _card(self, name: str, max_model_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "atom",
            "root": self.model_names[0],
            "parent": None,
            "max_model_len": max_model_len,
        }
