"""From an answer's text to content, reasoning and tool calls."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from atom.entrypoints.parsing.calls.base import ToolFormat
from atom.entrypoints.parsing.deltas import ChatDelta, DeltaWriter, ParsedMessage
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.reasoning.formats import Channels, Phrases, ThinkTags
from atom.entrypoints.parsing.text_stream import Markers, Steps, TextStream
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.entrypoints.parsing.tool_parsers.gpt_oss import GptOss

# Answers that must hold calls and go on repeating one: they end there.


class RepeatFilter:
    """Lets deltas pass up to the first call that repeats an earlier one, name and arguments.

    A call is held back while it may still turn out to be a repetition.

    Attributes:
        is_closed: a repetition has come, and nothing passes any more.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._earlier: list[tuple[str, str]] = []
        self._name = ""
        self._arguments: list[str] = []
        self._length = 0
        # Earlier calls that the one that is held back may repeat.
        self._alike: list[tuple[str, str]] = []
        self._held: list[ChatDelta] = []

    def take(self, deltas: Iterable[ChatDelta]) -> list[ChatDelta]:
        passed: list[ChatDelta] = []
        for delta in deltas:
            if delta.tool_calls is None or delta.tool_calls[0].id is not None:
                passed += self._end_call()
            if not self.is_closed:
                passed += self._take(delta)
        return passed

    def finish(self) -> list[ChatDelta]:
        """Nothing follows; returns the rest."""
        return self._end_call()

    def _take(self, delta: ChatDelta) -> list[ChatDelta]:
        if delta.tool_calls is None:
            return [delta]
        (piece,) = delta.tool_calls
        if piece.id is not None:
            self._name = piece.function.name or ""
            self._alike = [call for call in self._earlier if call[0] == self._name]
        text = piece.function.arguments
        start, self._length = self._length, self._length + len(text)
        self._arguments.append(text)
        self._alike = [call for call in self._alike if call[1].startswith(text, start)]
        self._held.append(delta)
        return [] if self._alike else self._release()

    def _end_call(self) -> list[ChatDelta]:
        if not self._name:
            return []
        call = (self._name, "".join(self._arguments))
        self._name, self._arguments, self._length = "", [], 0
        if call in self._earlier:
            self.is_closed = True
            self._held.clear()
        self._earlier.append(call)
        return self._release()

    def _release(self) -> list[ChatDelta]:
        held, self._held = self._held, []
        return held


Format = TypeVar("Format")


class ChatOutputParser:
    """Reads one answer, in pieces or whole; what comes out depends on the text alone.

    Text is held back only while it may still become a marker. No marker of the formats is
    ever part of what comes out: one that makes no sense where it stands is left out.

    Args:
        tool_parser: the name of a format in `TOOL_PARSERS`; without one calls are content.
        reasoning_parser: a name in `REASONING_PARSERS`; without one reasoning is content.
        tools: the request's tools in OpenAI's shape.
        starts_in_reasoning: the prompt ended within reasoning.
        id_salt: makes ids of calls unique among answers, for formats that bring none.
        ends_at_repeat: a call that repeats an earlier one ends the answer, itself left out.

    Attributes:
        finish_reason: None until `finish`; `tool_calls` only if every call is complete.
        incomplete_call: the index of a call that the text ended in; None without one.

    Raises:
        ValueError: for a format that does not exist.
    """

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        starts_in_reasoning: bool,
        *,
        id_salt: str = "",
        ends_at_repeat: bool = False,
    ) -> None:
        self._create_another = functools.partial(
            ChatOutputParser,
            tool_parser,
            reasoning_parser,
            tools,
            starts_in_reasoning,
            id_salt=id_salt,
            ends_at_repeat=ends_at_repeat,
        )
        self.finish_reason: str | None = None
        self.incomplete_call: int | None = None
        self._text = TextStream()
        self._repeats = RepeatFilter() if ends_at_repeat else None
        self._reasoning = (
            None
            if reasoning_parser is None
            else _look_up(REASONING_PARSERS, reasoning_parser, "reasoning")
        )
        foreign = () if self._reasoning is None else self._reasoning.markers
        self._tools: ToolFormat | None = None
        if tool_parser is not None:
            schemas = {str(t["function"]["name"]): _schema(t["function"]) for t in tools or ()}
            self._tools = _look_up(TOOL_PARSERS, tool_parser, "tool")(foreign, schemas)
        if isinstance(self._reasoning, Channels):
            if self._tools is None:
                self._tools = GptOss(foreign, {})
            if isinstance(self._tools, GptOss):
                self._tools.reasons = True
        short_ids = self._tools is not None and self._tools.short_ids
        self._out = DeltaWriter(id_salt, short_ids=short_ids)
        self._markers = Markers(foreign) if self._tools is None else self._tools.all
        self._opening: frozenset[str] = frozenset() if self._tools is None else self._tools.opening
        self._steps = self._read(starts_in_reasoning)

    @property
    def is_closed(self) -> bool:
        """Whether a repeated call has ended the answer."""
        return self._repeats is not None and self._repeats.is_closed

    def closes_after(self, text: str) -> bool:
        """Take the next piece of the text; whether a repeated call has ended the answer."""
        self.feed(text)
        return self.is_closed

    def feed(self, text: str) -> list[ChatDelta]:
        """Take the next piece of the text; returns what is certain now."""
        if self.finish_reason is not None:
            raise ValueError("the answer is finished")
        if text:
            self._text.push(text)
            next(self._steps, None)
        return self._passed(self._out.take())

    def finish(self, reason: str) -> list[ChatDelta]:
        """Say that nothing follows, and the engine's reason; returns the rest."""
        self._text.end()
        next(self._steps, None)
        self._out.finish()
        deltas = self._passed(self._out.take())
        if self._repeats is not None:
            deltas += self._repeats.finish()
        if self._out.is_cut and not self.is_closed:
            self.incomplete_call = self._out.num_calls - 1
        made_calls = self._out.num_calls > 0 and (reason == "stop" or self.is_closed)
        is_complete = self.incomplete_call is None
        self.finish_reason = "tool_calls" if made_calls and is_complete else reason
        return deltas

    def parse_complete(self, text: str, reason: str) -> ParsedMessage:
        """A whole answer, as if it had been streamed; this parser's own state stays out of it."""
        parser = self._create_another()
        return ParsedMessage.of([*parser.feed(text), *parser.finish(reason)])

    def _passed(self, deltas: list[ChatDelta]) -> list[ChatDelta]:
        return deltas if self._repeats is None else self._repeats.take(deltas)

    def _read(self, starts_in_reasoning: bool) -> Steps[None]:
        reasoning, tools, text, out = self._reasoning, self._tools, self._text, self._out
        # The last marker; "" where content goes on without one, None at the end of the text.
        marker: str | None = ""
        if isinstance(reasoning, Phrases) and (yield from reasoning.begins(text)):
            marker = yield from text.until(Markers(reasoning.closes), out.reasoning)
        tags = reasoning if isinstance(reasoning, ThinkTags) else None
        if starts_in_reasoning and tags is not None:
            marker = tags.open
        is_start = True
        while marker is not None:
            if tags is not None and marker == tags.open:
                marker = yield from self._read_reasoning(tags.close)
                is_start = True
            elif tools is not None and marker in tools.opening:
                marker = (yield from tools.read(marker, text, out)) or ""
                is_start = False
            else:
                if marker:
                    out.marker()
                if is_start and tools is not None:
                    yield from tools.begin(text, out)
                is_start = False
                marker = yield from text.until(self._markers, out.content)

    def _read_reasoning(self, close: str) -> Steps[str | None]:
        """Read to the marker that ends reasoning, and return it."""
        while True:
            marker = yield from self._text.until(self._markers, self._out.reasoning)
            if marker is None or marker == close or marker in self._opening:
                return marker


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters")
    return schema if isinstance(schema, Mapping) else {}


def _look_up(formats: Mapping[str, Format], name: str, kind: str) -> Format:
    if name not in formats:
        raise ValueError(f"no {kind} parser is called {name!r}; there are {', '.join(formats)}")
    return formats[name]
