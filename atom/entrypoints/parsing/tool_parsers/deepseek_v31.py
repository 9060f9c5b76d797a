"""DeepSeek V3.1: a name and JSON between special tokens.

Source: the checkpoint's chat template.
"""

from __future__ import annotations

from atom.entrypoints.parsing.calls.base import SectionFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar, tagged
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Steps, TextStream
from atom.structured_output.tags import Format, literal, sequence, token

CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _call(name: str, arguments: Format) -> Format:
    return tagged(CALL_BEGIN, sequence(literal(name), token(SEPARATOR), arguments), CALL_END)


class DeepseekV31(SectionFormat):
    template_texts = (("<｜tool▁call▁begin｜>",),)
    grammar = CallGrammar(_call, separator="", section=SECTION, forbidden=("<｜tool",))
    markers = (*SECTION, CALL_BEGIN, SEPARATOR, CALL_END)
    opening = frozenset({SECTION[0], CALL_BEGIN})
    section_end = SECTION[1:]
    call_begin = CALL_BEGIN
    call_end = frozenset({CALL_END, SECTION[1]})

    def read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        pieces: list[str] = []
        marker = yield from text.until(self.all, pieces.append)
        name = "".join(pieces).strip()
        if marker != SEPARATOR or not name:
            return marker  # None: cut before the name was whole
        out.begin_call(name)
        marker = yield from self.read_arguments(text, out.arguments)
        if marker is not None:
            out.end_call()
        return marker
