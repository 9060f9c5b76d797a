"""Kimi K2, K2.5 and K2.6: `functions.NAME:IDX` and JSON between special tokens.

Source: the checkpoints' chat template and tool call guide.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from atom.entrypoints.parsing.calls.base import SectionFormat, Tools
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar, tagged
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Steps, TextStream
from atom.quoting import quote
from atom.structured_output.tags import Format, literal, sequence, token

logger = logging.getLogger(__name__)

# Some checkpoints write the singular.
SECTION_BEGIN = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
SECTION_END = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
CALL_BEGIN = "<|tool_call_begin|>"
CALL_END = "<|tool_call_end|>"
END_OF_TURN = "<|im_end|>"

# Ids that other servers make: a history with them teaches the model to write such.
_FOREIGN = re.compile(r"(call|fc|toolu|tooluse|chatcmpl-tool)[-_].*|[0-9a-f-]{8,}")
_NAME = re.compile(r"(?!.*\.[0-9]+$).*[^0-9].*")


def _call(name: str, arguments: Format) -> Format:
    number = {"type": "regex", "pattern": "[0-9]{1,6}"}
    head = sequence(literal(f"functions.{name}:"), number, token(ARGUMENT_BEGIN))
    return tagged(CALL_BEGIN, sequence(head, arguments), CALL_END)


class KimiK2(SectionFormat):
    """Ids are the model's own and arguments its exact text: history must read as it wrote it."""

    template_texts = (
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        ("<|tool_calls_section_begin|>",),
    )
    model_types = ("kimi_k2", "kimi_k25")
    grammar = CallGrammar(
        _call,
        separator="",
        section=(SECTION_BEGIN[0], SECTION_END[0]),
        forbidden=("<|tool_call",),
    )
    markers = (*SECTION_BEGIN, *SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END, END_OF_TURN)
    opening = frozenset({*SECTION_BEGIN, CALL_BEGIN})
    section_end = (*SECTION_END, END_OF_TURN)
    call_begin = CALL_BEGIN
    call_end = frozenset({CALL_END, *SECTION_END, END_OF_TURN})

    def read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        head: list[str] = []
        marker = yield from text.until(self.all, head.append)
        if marker is None:
            return None  # cut before the name was whole
        call_id = "".join("".join(head).split())
        name = name_in(call_id, self.tools)
        if name is None and len(self.tools) == 1:
            name = next(iter(self.tools))
        if name is None:
            return (yield from self._read_nameless(call_id, marker, text, out))
        out.begin_call(name, call_id)
        if marker == ARGUMENT_BEGIN:
            marker = yield from self.read_arguments(text, out.arguments)
        if marker is not None:
            out.end_call()
        return marker

    def _read_nameless(
        self, call_id: str, marker: str | None, text: TextStream, out: DeltaWriter
    ) -> Steps[str | None]:
        """A call whose arguments must say which tool it is of; otherwise it is left out."""
        pieces: list[str] = []
        if marker == ARGUMENT_BEGIN:
            marker = yield from self.read_arguments(text, pieces.append)
        arguments = "".join(pieces)
        name = tool_for(arguments, self.tools)
        if name is None:
            logger.warning("left out a call whose id %s names no tool", quote(call_id))
            return marker
        out.begin_call(name, call_id)
        out.arguments(arguments)
        out.end_call()
        return marker


def name_in(call_id: str, tools: Tools) -> str | None:
    """The tool that an id names; None when it names none."""
    has_prefix = call_id.startswith("functions.")
    whole = call_id.removeprefix("functions.")
    stem, colon, _ = whole.rpartition(":")
    for name in (call_id, whole, stem):
        if name in tools:
            return name
    name = stem if colon else whole
    is_foreign = _FOREIGN.fullmatch(name) is not None and not has_prefix
    # What is no declared tool's is the client's to judge, as long as it is a name.
    return None if is_foreign or not _NAME.fullmatch(name) else name


def tool_for(arguments: str, tools: Tools) -> str | None:
    """The one tool that takes these arguments; None when none or several do."""
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    takes = [name for name, schema in tools.items() if given.keys() <= _properties(schema)]
    if len(takes) > 1:
        takes = [name for name in takes if set(tools[name].get("required", ())) <= given.keys()]
    return takes[0] if len(takes) == 1 else None


def _properties(schema: Mapping[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) else set()
