"""Qwen3-Coder, Qwen3-Next and Qwen 3.5: a tag for the function and one for each parameter.

Source: the checkpoints' chat templates. Values are plain text, typed by the tool's schema.
"""

from __future__ import annotations

from atom.entrypoints.openai.chat.deltas import DeltaWriter
from atom.entrypoints.openai.parsing.text_stream import Markers, Steps, TextStream
from atom.entrypoints.openai.parsing.tool_parsers.base import ToolFormat
from atom.entrypoints.openai.parsing.tool_parsers.call_grammar import CallGrammar, tagged
from atom.entrypoints.openai.parsing.tool_parsers.parameter_tags import Lines, TaggedValue
from atom.entrypoints.openai.parsing.tool_parsers.typed_arguments import TypedArguments
from atom.structured_output.tags import Format, literal, sequence, token

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_NAME_END = Markers((">", "\n"))
_IN_CALL = Markers((PARAMETER, FUNCTION_END, FUNCTION, CLOSE, OPEN))
_VALUE = TaggedValue(
    {
        PARAMETER_END: (PARAMETER, FUNCTION_END, CLOSE),
        FUNCTION_END: (CLOSE,),
    }
)


def _call(name: str, arguments: Format) -> Format:
    parameters = {**arguments, "style": "qwen_xml"}
    line = literal("\n")
    head = sequence(line, token(FUNCTION), literal(f"{name}>\n"))
    return tagged(OPEN, sequence(head, parameters, line, token(FUNCTION_END), line), CLOSE)


class Qwen3Coder(ToolFormat):
    """Models sometimes leave `<tool_call>` out, or `</parameter>`."""

    grammar = CallGrammar(_call, separator="\n", section=None, takes_json=False)
    markers = (OPEN, CLOSE, FUNCTION, FUNCTION_END)
    opening = frozenset({OPEN, FUNCTION})

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        marker: str | None = opening
        while marker in self.markers:
            if marker == FUNCTION:
                marker = yield from self._read_call(text, out)
            elif marker == CLOSE:
                break
            else:
                out.marker()
                marker = yield from text.until(self.all, out.content)
        out.marker()
        return marker

    def _read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        head: list[str] = []
        marker = yield from text.until(_NAME_END, head.append)
        name = "".join(head).strip().strip("\"'")
        if marker is None:
            return None  # cut before the name was whole
        if name:
            out.begin_call(name)
        arguments = TypedArguments(self.tools.get(name, {}), out)
        marker = yield from text.until(_IN_CALL, lambda _: None)
        while marker == PARAMETER:
            marker = yield from self._read_parameter(arguments, text)
        if name and marker is None:
            out.cut_call()
        elif name:
            arguments.finish()
            out.end_call()
        return marker

    def _read_parameter(self, arguments: TypedArguments, text: TextStream) -> Steps[str | None]:
        head: list[str] = []
        if (yield from text.until(_NAME_END, head.append)) is None:
            return None
        arguments.begin("".join(head).strip().strip("\"'"))
        value = Lines(arguments.feed)
        end = yield from _VALUE.read(text, value.feed)
        if end is None:
            return None
        arguments.end()
        if end != PARAMETER_END:
            return end
        return (yield from text.until(_IN_CALL, lambda _: None))
