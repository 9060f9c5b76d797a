"""Hermes, Qwen 2.5 and Qwen 3: JSON objects in `<tool_call>` tags.

Source: the checkpoints' chat templates. Within strings of the JSON, tags are text.
"""

from __future__ import annotations

import json

from atom.entrypoints.parsing.calls.base import ToolFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar, tagged
from atom.entrypoints.parsing.calls.json_call import JsonCall, read_broken, read_call_list
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Steps, TextStream
from atom.structured_output.tags import Format, literal, sequence

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _call(name: str, arguments: Format) -> Format:
    head = literal(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
    return tagged(OPEN, sequence(head, arguments, literal("}\n")), CLOSE)


class Hermes(ToolFormat):
    template_texts = (("<tool_call>", "</tool_call>"),)
    model_types = ("qwen2", "qwen3", "qwen3_moe")
    grammar = CallGrammar(_call, separator="\n", section=None)
    markers = (OPEN, CLOSE)
    opening = frozenset({OPEN})

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        marker: str | None = opening
        while marker == OPEN:
            out.marker()
            marker = yield from self._read_tag(text, out)
        out.marker()
        return marker

    def _read_tag(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        """Read what a tag holds; returns the marker that ended it."""
        char = yield from text.skip_space(out.content)
        if char == "[":  # SmolLM2 writes a list
            last = yield from read_call_list(text, out, self.own)
            if last != "":
                return last
        while char == "{":
            call = JsonCall(text, out, keys=None, accepts=bool, is_eager=True)
            yield from call.read()
            if call.is_open:
                return (yield from read_broken(text, out, self.own))
            if not call.has_begun and not text.at_end:  # otherwise it was cut
                out.content(self.all.without(call.raw))
            if not (call.has_begun and call.is_whole):
                break
            char = yield from text.skip_space(out.content)
        return (yield from text.until(self.all, out.content))
