"""Kimi K3: sections, calls and arguments in tags that are made of special tokens and text.

Source: the format of the checkpoint's `encoding_k3.py`, which renders chats where other models have
a chat template, as public renderers and their fixtures show it. An argument's tag says its type;
strings are plain text, others JSON.
"""

from __future__ import annotations

import re

from atom.entrypoints.parsing.calls.base import ToolFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.calls.parameter_grammar import ParameterGrammar
from atom.entrypoints.parsing.calls.parameter_tags import TaggedValue
from atom.entrypoints.parsing.calls.typed_arguments import TypedArguments
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Markers, Steps, TextStream, ignore
from atom.structured_output.tags import Format, literal, sequence, token

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
RESPONSE = (f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}")
THINK = (f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}")
TOOLS, TOOLS_END = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
MESSAGE_END = f"{CLOSE}message{SEP}"

_CALL, _CALL_END = f"{OPEN}call ", f"{CLOSE}call{SEP}"
_ARGUMENT, _ARGUMENT_END = f"{OPEN}argument ", f"{CLOSE}argument{SEP}"
_JSON, _JSON_END = f"{OPEN}json ", f"{CLOSE}json{SEP}"
_LAST = (TOOLS_END, MESSAGE_END, END)

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_HEAD_END = Markers((SEP,))
_IN_SECTION = Markers((_CALL, *_LAST))
_IN_CALL = Markers((_ARGUMENT, _JSON, _CALL_END, _CALL, *_LAST))
_VALUE = TaggedValue({_ARGUMENT_END: (_ARGUMENT, _CALL_END, TOOLS_END)})
_WHOLE = TaggedValue({_JSON_END: (_CALL_END, TOOLS_END)})


def _tag(name: str, *attributes: Format) -> Format:
    return sequence(token(OPEN), literal(name), *attributes, token(SEP))


def _end(name: str) -> Format:
    return sequence(token(CLOSE), literal(name), token(SEP))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _parameter(name: Format, kind: str, value: Format) -> Format:
    head = _tag("argument", literal(' key="'), name, literal(f'" type="{kind}"'))
    return sequence(head, value, _end("argument"))


_PARAMETERS = ParameterGrammar(_parameter, (OPEN, CLOSE, SEP, END), _escaped)


def _call(name: str, arguments: Format) -> Format:
    number: Format = {"type": "regex", "pattern": "[0-9]{1,6}"}
    head = literal(f' tool="{_escaped(name)}" index="')
    whole = sequence(_tag("json", literal(' type="object"')), arguments, _end("json"))
    parameters = _PARAMETERS.of(arguments) or whole
    return sequence(_tag("call", head, number, literal('"')), parameters, _end("call"))


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


# A prompt without thoughts has opened the section of the answer's text.
_RESPONSE = _optional(token(RESPONSE[0]))
_MESSAGE_END = _optional(token(MESSAGE_END))
_FREE: Format = {"type": "any_tokens", "exclude_tokens": [OPEN, CLOSE, SEP, END]}


def in_response(content: Format) -> Format:
    """The section of the answer's text."""
    return sequence(_RESPONSE, content, token(RESPONSE[1]))


class KimiK3(ToolFormat):
    template_texts = (("<|open|>", "<|sep|>", "argument"),)
    model_types = ("kimi_k3",)
    grammar = CallGrammar(
        _call,
        separator="",
        section=None,
        head=sequence(in_response(literal("")), token(TOOLS)),
        tail=sequence(token(TOOLS_END), _MESSAGE_END),
        text=sequence(_RESPONSE, _FREE, _optional(sequence(token(RESPONSE[1]), _MESSAGE_END))),
        takes_json=False,
    )
    markers = (*RESPONSE, TOOLS, TOOLS_END, MESSAGE_END, END)
    special_tokens = (OPEN, CLOSE, SEP, END)
    opening = frozenset({TOOLS})

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        del opening
        out.marker()
        marker = yield from text.until(_IN_SECTION, ignore)
        while marker == _CALL:
            marker = yield from self._read_call(text, out)
        out.marker()
        return marker

    def _read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        told = yield from _read_attributes(text)
        if told is None:
            return None  # cut before the name was whole
        name = told.get("tool", "")
        call = out if name else DeltaWriter("")  # one without a name is left out
        call.begin_call(name)
        arguments = TypedArguments(self.tools.get(name, {}), call)
        marker = yield from text.until(_IN_CALL, ignore)
        while marker in (_ARGUMENT, _JSON):
            told = yield from _read_attributes(text)
            if told is None:
                marker = None
            elif marker == _JSON:
                marker = yield from _WHOLE.read(text, arguments.whole)
            else:
                arguments.begin(told.get("key", ""), told.get("type"))
                marker = yield from _VALUE.read(text, arguments.feed)
                if marker is not None:
                    arguments.end()
            if marker is not None:
                marker = yield from text.until(_IN_CALL, ignore)
        if marker is not None:
            arguments.finish()
            call.end_call()
        if marker == _CALL_END:
            marker = yield from text.until(_IN_SECTION, ignore)
        return marker


def _read_attributes(text: TextStream) -> Steps[dict[str, str] | None]:
    """The rest of an opening tag; None where the text ends within it."""
    pieces: list[str] = []
    if (yield from text.until(_HEAD_END, pieces.append)) is None:
        return None
    return {
        name: value.replace("&quot;", '"').replace("&amp;", "&")
        for name, value in _ATTRIBUTE.findall("".join(pieces))
    }
