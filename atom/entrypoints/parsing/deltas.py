"""What an answer is made of: pieces in the contract of OpenAI's streams, and whole messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Literal

import msgspec


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """`name` comes once, with the call's first piece; `arguments` are to be concatenated."""

    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """`index` numbers an answer's calls from 0; `id` and `type` come with the first piece."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of an answer: exactly one of its fields is set, and it is not empty."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ParsedMessage(msgspec.Struct, frozen=True):
    """A whole answer; None means that no such piece came."""

    content: str | None
    reasoning_content: str | None
    tool_calls: list[ToolCall]

    @classmethod
    def of(cls, deltas: Iterable[ChatDelta]) -> ParsedMessage:
        """The pieces put together, as a client does it."""
        content: list[str] = []
        reasoning: list[str] = []
        heads: list[ToolCallDelta] = []
        arguments: list[list[str]] = []
        for delta in deltas:
            if delta.content is not None:
                content.append(delta.content)
            if delta.reasoning_content is not None:
                reasoning.append(delta.reasoning_content)
            for piece in delta.tool_calls or ():
                if piece.index == len(heads):
                    heads.append(piece)
                    arguments.append([])
                arguments[piece.index].append(piece.function.arguments)
        calls = [
            ToolCall(head.id or "", FunctionCall(head.function.name or "", "".join(pieces)))
            for head, pieces in zip(heads, arguments, strict=True)
        ]
        return cls("".join(content) or None, "".join(reasoning) or None, calls)


class DeltaWriter:
    """Collects what a parser finds; `take` gives it away as deltas.

    White space around arguments is left out, and so is white space alone that precedes a call,
    stands between two markers, or ends an answer with calls: it separates and says nothing.

    Args:
        short_ids: ids that are made are nine letters and digits, as some templates demand.

    Attributes:
        num_calls: tool calls begun so far.
    """

    def __init__(self, id_salt: str, *, short_ids: bool = False) -> None:
        self.num_calls = 0
        self._short_ids = short_ids
        self._id_salt = id_salt
        self._deltas: list[ChatDelta] = []
        self._text: list[str] = []
        self._is_reasoning = False
        # White space at the start or after a marker, while nothing else has come; None elsewhere.
        self._gap: list[str] | None = []
        self._has_arguments = False
        self._held_space: list[str] = []
        self._arguments: list[str] = []
        # Of the last call: all of its arguments, and whether its end was read.
        self._call: list[str] = []
        self._is_ended = True

    def content(self, text: str) -> None:
        if self._gap is not None:
            self._gap.append(text)
            if not text or text.isspace():
                return
            text = "".join(self._gap)
            self._gap = None
        self._add_text(text, is_reasoning=False)

    def reasoning(self, text: str) -> None:
        self._add_text(text, is_reasoning=True)

    def marker(self) -> None:
        """A marker was passed; content may follow."""
        self._gap = []

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call; without a native id it gets one of its own."""
        self._flush_text()
        self._has_arguments = False
        self._call, self._is_ended = [], False
        call_id = call_id or self.create_id()
        function = FunctionDelta("", name)
        self._add_piece(ToolCallDelta(self.num_calls, function, call_id, "function"))
        self.num_calls += 1

    def create_id(self) -> str:
        """An id for the next call."""
        digest = hashlib.blake2b(f"{self._id_salt}/{self.num_calls}".encode(), digest_size=12)
        return digest.hexdigest()[:9] if self._short_ids else f"call_{digest.hexdigest()}"

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that has begun."""
        if not self._has_arguments:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._arguments += (*self._held_space, kept)
            self._held_space = []
            self._has_arguments = True
        if len(kept) < len(text):
            self._held_space.append(text[len(kept) :])

    def end_call(self) -> None:
        """The call is complete: without arguments they are `{}`."""
        if not self._has_arguments:
            self._arguments.append("{}")
        self._flush_arguments()
        self._held_space = []
        self._is_ended = True
        self.marker()

    def finish(self) -> None:
        """Nothing follows: without calls, white space after the last marker is content."""
        if self._gap and not self.num_calls:
            self._add_text("".join(self._gap), is_reasoning=False)
        self._gap = None

    @property
    def is_cut(self) -> bool:
        """Whether the last call is not complete: its arguments are no object, and no end was read
        (which some formats leave to the end of the text).
        """
        return not (self._is_ended or is_json("".join((*self._call, *self._arguments)), dict))

    def take(self) -> list[ChatDelta]:
        self._flush_text()
        self._flush_arguments()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add_text(self, text: str, *, is_reasoning: bool) -> None:
        if is_reasoning != self._is_reasoning:
            self._flush_text()
            self._is_reasoning = is_reasoning
        self._text.append(text)

    def _flush_text(self) -> None:
        text = "".join(self._text)
        self._text = []
        if text and self._is_reasoning:
            self._deltas.append(ChatDelta(reasoning_content=text))
        elif text:
            self._deltas.append(ChatDelta(content=text))

    def _flush_arguments(self) -> None:
        if self._arguments:
            text = "".join(self._arguments)
            self._arguments = []
            self._call.append(text)
            self._add_piece(ToolCallDelta(self.num_calls - 1, FunctionDelta(text)))

    def _add_piece(self, piece: ToolCallDelta) -> None:
        self._deltas.append(ChatDelta(tool_calls=[piece]))


def is_json(text: str, kind: type = object) -> bool:
    """Whether a text is JSON, of a value of this type."""
    try:
        return isinstance(json.loads(text), kind)
    except (ValueError, RecursionError):
        return False
