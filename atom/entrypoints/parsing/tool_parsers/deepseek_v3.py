"""DeepSeek V3 and R1: a name and fenced JSON between special tokens.

Source: the checkpoints' chat template. Arguments are the exact text within the fence.
"""

from __future__ import annotations

import re

from atom.entrypoints.parsing.calls.base import SectionFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar, tagged
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Emit, Markers, Steps, TextStream, ignore
from atom.structured_output.tags import Format, literal, sequence, token

CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"

SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

_MARKERS = (*SECTION, CALL_BEGIN, SEPARATOR, CALL_END)
_NAME_END = Markers((*_MARKERS, "\n", FENCE))
# Strings of JSON hold no raw line feed, so that after one even a part is the fence's.
_CLOSING = re.compile(r"(\n`{1,2}|```)$")


def _call(name: str, arguments: Format) -> Format:
    head = sequence(literal("function"), token(SEPARATOR), literal(f"{name}\n```json\n"))
    return tagged(CALL_BEGIN, sequence(head, arguments, literal("\n```")), CALL_END)


class DeepseekV3(SectionFormat):
    template_texts = (("<｜tool▁call▁begin｜>", "```json"),)
    model_types = ("deepseek_v3",)
    grammar = CallGrammar(_call, separator="\n", section=SECTION, forbidden=("<｜tool",))
    markers = _MARKERS
    opening = frozenset({_MARKERS[0], CALL_BEGIN})
    section_end = _MARKERS[1:2]
    call_begin = CALL_BEGIN
    call_end = frozenset({CALL_END, SECTION[1]})

    def read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        marker = yield from text.until(self.all, ignore)  # the call's type, `function`
        if marker != SEPARATOR:
            return marker
        yield from text.skip_space()
        head: list[str] = []
        marker = yield from text.until(_NAME_END, head.append)
        if marker is None:
            return None  # cut before the name was whole
        name = "".join(head).strip()
        if not name:
            return marker
        out.begin_call(name)
        if marker in ("\n", FENCE):
            marker = yield from self._read_arguments(marker == FENCE, text, out)
        if marker is not None:
            out.end_call()
        return marker

    def _read_arguments(
        self, fenced: bool, text: TextStream, out: DeltaWriter
    ) -> Steps[str | None]:
        if not fenced:
            yield from text.skip_space()
            fenced = yield from text.accept(FENCE)
        if not fenced:
            return (yield from self.read_arguments(text, out.arguments))
        yield from text.accept("json")
        inside = _Fenced(out.arguments)
        marker = yield from self.read_arguments(text, inside.feed)
        inside.finish()
        return marker


class _Fenced:
    """Passes on what precedes a closing fence."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[str] = []

    def feed(self, text: str) -> None:
        kept = text.rstrip("` \t\r\n")
        if kept:
            self._emit("".join(self._held) + kept)
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def finish(self) -> None:
        self._emit(_CLOSING.sub("", "".join(self._held).rstrip()))
