"""Llama 3.1 to 3.3: bare JSON objects, `{"name": ..., "parameters": {...}}`.

Any model can write them: where its own format is not known, calls that are forced are such.

Source: the checkpoints' chat template and prompt format guide. An answer's content begins
with a call or holds none; calls follow one another with `;` or white space between.
`<|python_tag|>` may precede them.
"""

from __future__ import annotations

import json

from atom.entrypoints.parsing.calls.base import ToolFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.calls.json_call import ARGUMENT_KEYS, JsonCall
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Markers, Steps, TextStream
from atom.structured_output.tags import Format, literal, sequence

PYTHON_TAG = "<|python_tag|>"
_KEYS = ARGUMENT_KEYS | {"type", "name"}
_BRACELESS: Format = {"type": "regex", "pattern": r"\s*([^\s{][\s\S]*)?"}
_NOTHING = Markers(())


def _call(name: str, arguments: Format) -> Format:
    head = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ')
    return sequence(head, arguments, literal("}"))


class Llama3Json(ToolFormat):
    template_texts = (("<|start_header_id|>", '"parameters"'),)
    grammar = CallGrammar(_call, separator="; ", section=None, text=_BRACELESS)
    markers = (PYTHON_TAG,)
    opening = frozenset({PYTHON_TAG})

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        del opening
        out.marker()
        yield from self.begin(text, out)
        return None

    def begin(self, text: TextStream, out: DeltaWriter) -> Steps[None]:
        while True:
            space: list[str] = []
            char = yield from text.skip_space(space.append)
            if char != "{":
                out.content("".join(space))
                return
            call = JsonCall(text, out, keys=_KEYS, accepts=self._is_tool, is_eager=False)
            yield from call.read()
            if not call.has_begun:
                out.content("".join(space) + self.all.without(call.raw))
                return
            if call.is_open:
                yield from text.until(_NOTHING, out.arguments)
            if not call.is_whole:
                return
            yield from text.skip_space(out.content)
            if (yield from text.accept(";")):
                out.marker()

    def _is_tool(self, name: str) -> bool:
        return name in self.tools or not self.tools
