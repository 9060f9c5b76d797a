"""Calls that are a tag for the function and one for each parameter, values as plain text."""

from __future__ import annotations

from typing import ClassVar

from atom.entrypoints.parsing.calls.base import ToolFormat, Tools
from atom.entrypoints.parsing.calls.parameter_tags import TaggedValue
from atom.entrypoints.parsing.calls.typed_arguments import TypedArguments
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Emit, Markers, Steps, TextStream

_NAME_END = Markers((">", "\n"))


class FunctionTags(ToolFormat):
    """Models sometimes leave out the tag that ends a parameter.

    Attributes:
        section: the tags around calls, which are markers.
        function, function_end: begin and end a call; the name follows the first, up to `>`.
        parameter, parameter_end: the same for a parameter.
    """

    section: ClassVar[tuple[str, str]]
    function: ClassVar[str]
    function_end: ClassVar[str]
    parameter: ClassVar[str]
    parameter_end: ClassVar[str]

    def __init__(self, foreign: tuple[str, ...], tools: Tools) -> None:
        super().__init__(foreign, tools)
        begin, end = self.section
        tags = (begin, end, self.function, self.function_end)
        self._tags = frozenset(tags)
        self._in_section = Markers((*tags, *self.markers, *foreign))
        self._in_call = Markers((self.parameter, self.function_end, self.function, end, begin))
        self._value = TaggedValue(
            {
                self.parameter_end: (self.parameter, self.function_end, end),
                self.function_end: (end,),
            }
        )

    def value(self, emit: Emit) -> Emit:
        """What passes on a value's text as the format means it."""
        return emit

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        marker: str | None = opening
        while marker in self._tags:
            if marker == self.function:
                marker = yield from self._read_call(text, out)
            elif marker == self.section[1]:
                break
            else:
                out.marker()
                marker = yield from text.until(self._in_section, out.content)
        out.marker()
        return marker

    def _read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        head: list[str] = []
        marker = yield from text.until(_NAME_END, head.append)
        name = _unquoted(head)
        if marker is None:
            return None  # cut before the name was whole
        call = out if name else DeltaWriter("")  # one without a name is left out
        call.begin_call(name)
        arguments = TypedArguments(self.tools.get(name, {}), call)
        marker = yield from text.until(self._in_call, lambda _: None)
        while marker == self.parameter:
            marker = yield from self._read_parameter(arguments, text)
        if marker is not None:
            arguments.finish()
            call.end_call()
        return marker

    def _read_parameter(self, arguments: TypedArguments, text: TextStream) -> Steps[str | None]:
        head: list[str] = []
        if (yield from text.until(_NAME_END, head.append)) is None:
            return None
        arguments.begin(_unquoted(head))
        end = yield from self._value.read(text, self.value(arguments.feed))
        if end is None:
            return None
        arguments.end()
        if end != self.parameter_end:
            return end
        return (yield from text.until(self._in_call, lambda _: None))


def _unquoted(pieces: list[str]) -> str:
    return "".join(pieces).strip().strip("\"'")
