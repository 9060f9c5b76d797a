"""Kimi K2, K2.5 and K2.6: `functions.NAME:IDX` and JSON between special tokens.

Source: the checkpoints' chat template and tool call guide.
"""

from __future__ import annotations

import re

from atom.entrypoints.openai.chat.deltas import DeltaWriter
from atom.entrypoints.openai.parsing.text_stream import Steps, TextStream
from atom.entrypoints.openai.parsing.tool_parsers.base import SectionFormat
from atom.entrypoints.openai.parsing.tool_parsers.call_grammar import CallGrammar, tagged
from atom.structured_output.tags import Format, literal, sequence, token

# Some checkpoints write the singular.
SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
CALL_BEGIN = "<|tool_call_begin|>"
CALL_END = "<|tool_call_end|>"
_NAME = re.compile(r"(?:functions\.)?(.*?)(?::[0-9]+)?")


def _call(name: str, arguments: Format) -> Format:
    number = {"type": "regex", "pattern": "[0-9]{1,6}"}
    head = sequence(literal(f"functions.{name}:"), number, token(ARGUMENT_BEGIN))
    return tagged(CALL_BEGIN, sequence(head, arguments), CALL_END)


class KimiK2(SectionFormat):
    """Ids are the model's own and arguments its exact text: history must read as it wrote it."""

    grammar = CallGrammar(
        _call,
        separator="",
        section=(SECTION_BEGIN[0], SECTION_END[0]),
        forbidden=("<|tool_call",),
    )
    markers = (*SECTION_BEGIN, *SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END)
    opening = frozenset({*SECTION_BEGIN, CALL_BEGIN})
    section_end = SECTION_END
    call_begin = CALL_BEGIN

    def read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        head: list[str] = []
        marker = yield from text.until(self.all, head.append)
        if marker is None:
            return None  # cut before the name was whole
        call_id = "".join("".join(head).split())
        match = _NAME.fullmatch(call_id)
        if match is None or not match[1]:
            out.content("".join(head))
            return marker
        out.begin_call(match[1], call_id)
        while marker == ARGUMENT_BEGIN:
            marker = yield from text.until(self.own, out.arguments)
        if marker is None:
            out.cut_call()
        else:
            out.end_call()
        return marker
