"""Chat's stream spelled by other APIs: one run of blocks, whole or as events.

Both answers, whole and streamed, come out of the same `Translation` fed with the same choices,
so they cannot differ.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.chat.generation import (
    ChoiceFormat,
    ChunkChoices,
    Generation,
    Usage,
    stream_outputs,
    unless_disconnected,
)
from atom.entrypoints.chat.protocol import ChatPrompt
from atom.entrypoints.http.body import describe
from atom.entrypoints.http.edge import caller_of
from atom.entrypoints.http.errors import ApiError, json_response
from atom.entrypoints.http.sse import EventStream, encode_named_event
from atom.entrypoints.http.unknown_fields import UnknownFields
from atom.model_engine.async_engine import AsyncEngine
from atom.outputs import RequestOutput

Event = dict[str, Any]
Chat = TypeVar("Chat", bound=ChatPrompt)


@dataclass
class Block:
    """An uninterrupted run of one kind of output.

    Attributes:
        index: its place in the answer.
        call_id, name: of a call.
        logprobs: chat's, of the text's tokens.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Translation(ABC):
    """Turns the choices of one chat, as they stream, into events and a whole answer.

    Use: `start`, `feed` for each choice, `finish`; `whole` is valid after `finish`.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # Whether the answer ended in a call that is not complete.
        self.ends_in_call = False
        self._open: Block | None = None
        # Of tokens that no text has come of yet.
        self._held_logprobs: list[dict[str, Any]] = []

    @abstractmethod
    def start(self, usage: Usage) -> list[Event]: ...

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    @abstractmethod
    def fail(self, error: ApiError) -> list[Event]:
        """The events that end a stream when generation fails."""

    @abstractmethod
    def _block_opened(self, block: Block) -> list[Event]: ...

    @abstractmethod
    def _block_grown(
        self, block: Block, piece: str, logprobs: list[dict[str, Any]]
    ) -> list[Event]: ...

    @abstractmethod
    def _block_closed(self, block: Block) -> list[Event]: ...

    @abstractmethod
    def _finished(self, usage: Usage, num_reasoning_tokens: int) -> list[Event]: ...

    @property
    def reasoning(self) -> str:
        """All that was reasoned so far."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    def feed(self, choice: Mapping[str, Any]) -> list[Event]:
        """The events of one choice of a chat's chunk."""
        delta = choice["delta"]
        self._held_logprobs += (choice.get("logprobs") or {}).get("content") or []
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content"):
            events += self._extend("reasoning", reasoning)
        if text := delta.get("content"):
            events += self._extend("text", text)
        for piece in delta.get("tool_calls") or ():
            events += self._extend_call(piece)
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]
            self.stop_reason = choice.get("stop_reason")
            self.ends_in_call = "incomplete_tool_call" in choice
        return events

    def finish(self, usage: Usage, num_reasoning_tokens: int) -> list[Event]:
        if self._open is not None and self._open.kind == "text":
            self._open.logprobs += self._held_logprobs
        is_call = self._open is not None and self._open.kind == "call"
        is_cut = self.ends_in_call if is_call else self.finish_reason == "length"
        events = self._close(complete=not is_cut)
        return [*events, *self._finished(usage, num_reasoning_tokens)]

    def _extend(self, kind: Literal["reasoning", "text"], piece: str) -> list[Event]:
        events: list[Event] = []
        block = self._open
        if block is None or block.kind != kind:
            block = Block(kind, len(self.blocks))
            events += self._begin(block)
        return [*events, *self._grow(block, piece)]

    def _extend_call(self, piece: Mapping[str, Any]) -> list[Event]:
        """Calls follow one another: a piece without an id belongs to the one that is open."""
        events: list[Event] = []
        function = piece.get("function") or {}
        block = self._open
        if piece.get("id"):
            block = Block("call", len(self.blocks), piece["id"], function["name"])
            events += self._begin(block)
        assert block is not None
        assert block.kind == "call"
        arguments = function.get("arguments")
        return [*events, *self._grow(block, arguments)] if arguments else events

    def _begin(self, block: Block) -> list[Event]:
        events = self._close(complete=True)
        self._open = block
        self.blocks.append(block)
        return [*events, *self._block_opened(block)]

    def _grow(self, block: Block, piece: str) -> list[Event]:
        block.pieces.append(piece)
        logprobs: list[dict[str, Any]] = []
        if block.kind == "text":
            logprobs, self._held_logprobs = self._held_logprobs, []
        block.logprobs += logprobs
        return self._block_grown(block, piece, logprobs)

    def _close(self, *, complete: bool) -> list[Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        block.complete = complete
        return self._block_closed(block)


def translate_request(
    model: type[Chat],
    fields: Mapping[str, Any],
    field_names: Mapping[str, str],
    unknown: UnknownFields,
) -> Chat:
    """The chat request that a translated request stands for.

    Args:
        field_names: the original request's names of chat's fields.
        unknown: takes the unknown fields of objects that are checked here.

    Raises:
        ApiError: 400 in the original request's names.
    """
    try:
        chat = model.model_validate(fields)
        unknown.take(chat)
    except ValidationError as error:
        raise renamed(describe(error), field_names) from None
    except ApiError as error:
        raise renamed(error, field_names) from None
    return chat


def renamed(error: ApiError, field_names: Mapping[str, str]) -> ApiError:
    """The error of a chat request in the names of the request that it was made from."""
    chat_name = re.split(r"[.\[]", error.param or "")[0]
    name = field_names.get(chat_name)
    if name is not None:
        if error.message.startswith(chat_name):
            error.message = name + error.message.removeprefix(chat_name)
        error.param = name
    return error


async def respond_translated(
    request: Request,
    engine: AsyncEngine,
    generation: Generation,
    choices: ChoiceFormat,
    translation: Translation,
    count_tokens: Callable[[str], Awaitable[int]],
) -> Response:
    """Generate one choice and answer, whole or as a stream, as `translation` spells it.

    Args:
        count_tokens: of reasoning.

    Raises:
        ClientDisconnect: when nobody waits for the answer any more.
    """
    outputs = stream_outputs(engine, replace(generation, caller=caller_of(request)))
    events = _events(outputs, ChunkChoices(generation, choices), translation, count_tokens)
    if not generation.stream:
        await unless_disconnected(request, _exhaust(events))
        return json_response(translation.whole())
    encoded = _encoded(events)
    first = await unless_disconnected(request, _first(encoded))
    return EventStream(first, encoded, lambda error: _encode(translation.fail(error)))


async def _events(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None],
    chunks: ChunkChoices,
    translation: Translation,
    count_tokens: Callable[[str], Awaitable[int]],
) -> AsyncGenerator[list[Event], None]:
    usage = Usage()
    started = False
    async with aclosing(outputs):
        async for number, output in outputs:
            usage.add(number, output)
            events = [] if started else translation.start(usage)
            started = True
            for choice in chunks.of(number, output):
                events += translation.feed(choice)
            if events:
                yield events
    yield translation.finish(usage, await count_tokens(translation.reasoning))


async def _exhaust(events: AsyncGenerator[list[Event], None]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


async def _encoded(events: AsyncGenerator[list[Event], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for some in events:
            yield _encode(some)


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _encode(events: Iterable[Event]) -> bytes:
    return b"".join(encode_named_event(event["type"], event) for event in events)
