"""GLM 4.5 to 4.7: a name, then tags for each argument's key and value.

Source: the checkpoints' chat templates. Values of strings are plain text, others JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from atom.entrypoints.parsing.calls.base import ToolFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar, tagged
from atom.entrypoints.parsing.calls.parameter_grammar import ParameterGrammar
from atom.entrypoints.parsing.calls.parameter_tags import TaggedValue
from atom.entrypoints.parsing.calls.typed_arguments import TypedArguments
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Markers, Steps, TextStream
from atom.structured_output.tags import Format, literal, sequence, token

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"

_NAME_END = Markers(("\n", KEY, CLOSE))
_IN_CALL = Markers((KEY, VALUE, CLOSE))
_KEY_END = Markers((KEY_END,))
_VALUE = TaggedValue({VALUE_END: (KEY, CLOSE)})


def glm_call(line: str) -> Callable[[str, Format], Format]:
    """(name, arguments) -> a call, with what stands between two tags."""
    feed = [literal(line)] if line else []

    def parameter(name: Format, kind: str, value: Format) -> Format:
        del kind
        key = [*feed, token(KEY), name, token(KEY_END), *feed]
        return sequence(*key, token(VALUE), value, token(VALUE_END))

    tags = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
    grammar = ParameterGrammar(parameter, tags)

    def call(name: str, arguments: Format) -> Format:
        parameters = grammar.of(arguments)
        if parameters is None:
            parameters = sequence(*feed, {**arguments, "style": "glm_xml"})
        return tagged(OPEN, sequence(literal(name), parameters, *feed), CLOSE)

    return call


class Glm45(ToolFormat):
    template_texts = (("<arg_key>", "<arg_value>"),)
    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)
    grammar = CallGrammar(glm_call("\n"), separator="\n", section=None, takes_json=False)
    markers = (OPEN, CLOSE)
    opening = frozenset({OPEN})

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        del opening
        out.marker()
        yield from text.skip_space()
        head: list[str] = []
        marker = yield from text.until(_NAME_END, head.append)
        name = "".join(head).strip()
        if marker is None or not name:
            return None  # cut before the name was whole
        out.begin_call(name)
        arguments = TypedArguments(self.tools.get(name, {}), out)
        if marker == "\n":
            marker = yield from text.until(_IN_CALL, lambda _: None)
        while marker == KEY:
            marker = yield from self._read_argument(arguments, text)
        if marker is not None:
            arguments.finish()
            out.end_call()
        return None

    def _read_argument(self, arguments: TypedArguments, text: TextStream) -> Steps[str | None]:
        key: list[str] = []
        if (yield from text.until(_KEY_END, key.append)) is None:
            return None
        marker = yield from text.until(_IN_CALL, lambda _: None)
        if marker != VALUE:
            return marker
        arguments.begin("".join(key).strip())
        if (yield from _VALUE.read(text, arguments.feed)) is None:
            return None
        arguments.end()
        return (yield from text.until(_IN_CALL, lambda _: None))
