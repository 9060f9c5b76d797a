"""Mistral: `[TOOL_CALLS]`, then a JSON list of calls, or a name and its JSON.

Source: mistral-common's tokenizers; the list up to version 7, `NAME[ARGS]{...}` from 11 on.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from atom.entrypoints.parsing.calls.base import ToolFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.calls.json_call import JsonValue, read_broken, read_call_list
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Steps, TextStream
from atom.structured_output.tags import Format, literal, sequence, token

TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_TEXT: Format = {"type": "any_tokens", "exclude_tokens": [TOOL_CALLS]}
_NO_NAME = re.compile(r"[^\w.-]")


def _listed(name: str, arguments: Format) -> Format:
    head = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
    return sequence(head, arguments, literal("}"))


def _named(name: str, arguments: Format) -> Format:
    return sequence(token(TOOL_CALLS), literal(name), token(ARGS), arguments)


class Mistral(ToolFormat):
    template_texts: ClassVar[tuple[tuple[str, ...], ...]] = (("[TOOL_CALLS]",),)
    model_types: ClassVar[tuple[str, ...]] = ("mistral", "mistral3")
    grammar = CallGrammar(
        _listed,
        separator=", ",
        section=None,
        head=sequence(token(TOOL_CALLS), literal("[")),
        tail=literal("]"),
        text=_TEXT,
    )
    markers = (TOOL_CALLS, ARGS, CALL_ID)
    opening = frozenset({TOOL_CALLS})
    short_ids = True

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        del opening
        out.marker()
        char = yield from text.skip_space()
        if char == "[":
            return (yield from read_call_list(text, out, self.own)) or None
        name: list[str] = []
        yield from text.scan(_name_end, name.append)
        call_id: list[str] = []
        if (yield from text.accept(CALL_ID)):
            yield from text.scan(_name_end, call_id.append)
        yield from text.accept(ARGS)
        if (yield from text.skip_space()) != "{" or not name:
            if not text.at_end:  # otherwise it was cut before the arguments
                out.content("".join(name))
            return None
        out.begin_call("".join(name), "".join(call_id) or None)
        value = JsonValue()
        if (yield from text.scan(value.find_end, out.arguments)) and not value.is_broken:
            out.end_call()
            return None
        return (yield from read_broken(text, out, self.own))


class MistralNamed(Mistral):
    """The newer spelling; both are read alike."""

    template_texts = (("[TOOL_CALLS]", "[ARGS]"),)
    model_types = ()
    grammar = CallGrammar(_named, separator="", section=None, text=_TEXT)


def _name_end(text: str, start: int) -> int:
    match = _NO_NAME.search(text, start)
    return -1 if match is None else match.start()
