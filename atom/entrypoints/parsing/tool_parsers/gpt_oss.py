"""gpt-oss: messages in channels, calls among them (the harmony format).

Source: OpenAI's harmony guide. The turn ends with a call, so that an answer holds one.
"""

from __future__ import annotations

import re

from atom.entrypoints.parsing.calls.base import ToolFormat, Tools
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Steps, TextStream
from atom.structured_output.tags import Format, literal, one_of, sequence, token

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


def _message(channel: str, content: Format) -> Format:
    return sequence(token(CHANNEL), literal(channel), token(MESSAGE), content)


_FREE: Format = {"type": "any_tokens", "exclude_tokens": list(MARKERS)}
_THOUGHT = sequence(_message("analysis", _FREE), token(END), token(START), literal("assistant"))
THINKS: Format = {"type": "optional", "content": _THOUGHT}


def final(content: Format) -> Format:
    """Thoughts or none, and then a final message."""
    return sequence(THINKS, _message("final", content))


def _call(name: str, arguments: Format) -> Format:
    # Models name the recipient in the channel's head, templates before it. What ends a call is an
    # end token, which no grammar names.
    kind = sequence(token(CONSTRAIN), literal("json"))
    written = sequence(token(CHANNEL), literal(f"commentary to=functions.{name} "), kind)
    rendered = sequence(
        literal(f" to=functions.{name}"),
        token(CHANNEL),
        literal("commentary "),
        one_of([kind, literal("json")]),
    )
    return sequence(one_of([written, rendered]), token(MESSAGE), arguments)


class GptOss(ToolFormat):
    """Attributes:
    reasons: the analysis channel is reasoning, and content otherwise.
    """

    template_texts = (("<|channel|>commentary", "functions."),)
    model_types = ("gpt_oss",)
    grammar = CallGrammar(
        _call, separator="", section=None, head=THINKS, text=final(_FREE), max_calls=1
    )
    markers = MARKERS
    opening = frozenset({START, CHANNEL})
    call_end = frozenset({END, CALL, RETURN})

    def __init__(self, foreign: tuple[str, ...], tools: Tools) -> None:
        super().__init__(foreign, tools)
        self.reasons = False

    def begin(self, text: TextStream, out: DeltaWriter) -> Steps[None]:
        """The recipient may come first, since the prompt ends within the message's head."""
        space: list[str] = []
        if (yield from text.skip_space(space.append)) == "t" and (yield from text.accept("to=")):
            yield from self._read_message("to=", text, out)
        else:
            out.content("".join(space))

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        out.marker()
        return (yield from self._read_message(opening, text, out))

    def _read_message(self, head: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        """Read on from within a message's head."""
        pieces = [head]
        while True:
            marker = yield from text.until(self.own, pieces.append)
            if marker == MESSAGE:
                return (yield from self._read_body("".join(pieces), text, out))
            if marker is None or marker in self.call_end:
                return None
            pieces.append(marker)

    def _read_body(self, head: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        recipient = _RECIPIENT.search(head)
        name = "" if recipient is None else recipient[1].removeprefix("functions.")
        if name:
            out.begin_call(name)
            marker = yield from self.read_arguments(text, out.arguments)
            if marker is not None:
                out.end_call()
        else:
            is_thought = self.reasons and _ANALYSIS.search(head)
            emit = out.reasoning if is_thought else out.content
            marker = yield from text.until(self.all, emit)
            out.marker()
        # Where a head follows without an end before it, it is read as one.
        return None if marker in self.call_end else marker
