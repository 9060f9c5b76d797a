"""Calls that are JSON objects, `{"name": ..., "arguments": {...}}`, read as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from atom.entrypoints.parsing.deltas import DeltaWriter, is_json
from atom.entrypoints.parsing.text_stream import Emit, Markers, Steps, TextStream

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})

_IN_STRING = re.compile(r'["\\]')
# No JSON has `<` outside of strings: there the model went on to a marker.
_IN_CONTAINER = re.compile(r'["{}\[\]<]')
_AFTER_SCALAR = re.compile(r"[,\]}\s<]")


class JsonValue:
    """Finds the end of one JSON value without judging it; see `TextStream.scan`.

    Attributes:
        is_broken: the value ended where no JSON value can.
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False
        self._is_scalar = False

    def find_end(self, text: str, start: int) -> int:
        while start < len(text):
            if self._is_escaped:
                self._is_escaped = False
                start += 1
                continue
            if not self._has_begun:
                self._has_begun = True
                self._is_scalar = text[start] not in '{["'
            pattern = _IN_STRING if self._in_string else _IN_CONTAINER
            match = (_AFTER_SCALAR if self._is_scalar else pattern).search(text, start)
            if match is None:
                return -1
            if self._is_scalar:
                return match.start()
            if match.group() == "<":
                self.is_broken = True
                return match.start()
            start = match.end()
            self._pass(match.group())
            if not (self._depth or self._in_string):
                return start
        return -1

    def _pass(self, char: str) -> None:
        if char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if char in "{[" else -1


class JsonCall:
    """One call; its keys may come in any order, arguments stream when the name came first.

    Args:
        keys: what the object may hold to be a call; None for anything.
        accepts: whether a name is that of a tool.
        is_eager: a name alone makes a call, too, once the object has ended; otherwise only a name
            and arguments do.

    Attributes:
        has_begun: it was found to be a call.
        is_open: it has begun, and its arguments have not ended: the text has, or they are no JSON.
        is_whole: the object has ended.
        raw: what was read while it was not known to be a call.
    """

    def __init__(
        self,
        text: TextStream,
        out: DeltaWriter,
        *,
        keys: frozenset[str] | None,
        accepts: Callable[[str], bool],
        is_eager: bool,
    ) -> None:
        self.has_begun = False
        self.is_open = False
        self.is_whole = False
        self._text = text
        self._out = out
        self._keys = keys
        self._accepts = accepts
        self._is_eager = is_eager
        self._raw: list[str] = []
        self._name: str | None = None
        self._arguments: list[str] | None = None

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def read(self) -> Steps[None]:
        """Read the object that comes next, up to its end or to where it is no call."""
        yield from self._pass_character()
        while True:
            char = yield from self._text.skip_space(self._keep)
            if char == '"':
                if not (yield from self._read_member()):
                    return
            elif char in (",", "}"):
                yield from self._pass_character()
                if char == "}":
                    break
            else:
                return
        self.is_whole = True
        if self._is_eager and self._name is not None and not self.has_begun:
            self._make()

    def _read_member(self) -> Steps[bool]:
        """Read a key and its value; whether the object goes on."""
        key = yield from self._read_string()
        if key is None or (self._keys is not None and key not in self._keys):
            return False
        if (yield from self._text.skip_space(self._keep)) != ":":
            return False
        yield from self._pass_character()
        char = yield from self._text.skip_space(self._keep)
        if key == "name" and self._name is None:
            return (yield from self._read_name(char))
        if key in ARGUMENT_KEYS and self._arguments is None:
            return (yield from self._read_arguments(char))
        return (yield from self._read_value(self._keep))

    def _read_name(self, first: str) -> Steps[bool]:
        name = (yield from self._read_string()) if first == '"' else None
        if not name or not self._accepts(name):
            return False
        self._name = name
        if self._arguments is not None:
            self._make()
        return True

    def _read_arguments(self, first: str) -> Steps[bool]:
        """Arguments stream when the name came first; a number or a word must be one of JSON's."""
        pieces: list[str] = []
        self._arguments = pieces
        can_stream = first in ("{", "[", '"')
        if self._name is not None and can_stream:
            self._begin()
            is_whole = yield from self._read_value(self._out.arguments)
            if is_whole:
                self._end()
            return is_whole
        is_whole = yield from self._read_value(pieces.append)
        self._keep("".join(pieces))
        if not is_whole or not (can_stream or is_json("".join(pieces))):
            return False
        if self._name is not None:
            self._make()
        return True

    def _make(self) -> None:
        """The whole call at once."""
        self._begin()
        self._out.arguments("".join(self._arguments or ()))
        self._end()

    def _begin(self) -> None:
        assert self._name is not None
        self.has_begun = self.is_open = True
        self._raw.clear()
        self._out.begin_call(self._name)

    def _end(self) -> None:
        self.is_open = False
        self._out.end_call()

    def _read_string(self) -> Steps[str | None]:
        pieces: list[str] = []
        is_whole = yield from self._read_value(pieces.append)
        raw = "".join(pieces)
        self._keep(raw)
        if not is_whole:
            return None
        try:
            value: str = json.loads(raw, strict=False)
            value.encode()  # half a surrogate pair is no text
        except ValueError:
            return None
        return value

    def _read_value(self, emit: Emit) -> Steps[bool]:
        value = JsonValue()
        found = yield from self._text.scan(value.find_end, emit)
        return found and not value.is_broken

    def _pass_character(self) -> Steps[bool]:
        return (yield from self._text.scan(_one, self._keep))

    def _keep(self, text: str) -> None:
        if not self.has_begun:
            self._raw.append(text)


def read_call_list(text: TextStream, out: DeltaWriter, markers: Markers) -> Steps[str | None]:
    """Read a JSON list of calls, which comes next, up to its end or to where it is none.

    Returns:
        The marker that ended arguments that are no JSON, or None for the end of the text; "" where
        there were none such.
    """
    yield from text.accept("[")
    while (yield from text.skip_space()) == "{":
        call = JsonCall(text, out, keys=None, accepts=bool, is_eager=True)
        yield from call.read()
        if call.is_open:
            return (yield from read_broken(text, out, markers))
        if not call.has_begun and not text.at_end:
            out.content(call.raw)
        if not call.is_whole:
            break
        yield from text.skip_space()
        yield from text.accept(",")
    yield from text.accept("]")
    out.marker()
    return ""


def read_broken(text: TextStream, out: DeltaWriter, markers: Markers) -> Steps[str | None]:
    """Read on where a call's arguments are no JSON: all up to a marker is theirs -> the marker."""
    marker = yield from text.until(markers, out.arguments)
    if marker is not None:
        out.end_call()
    return marker


def _one(text: str, start: int) -> int:
    return start + 1 if start < len(text) else -1
