"""What a format of tool calls is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Emit, Markers, Steps, TextStream

# The tools of a request: the JSON schema of each one's parameters by its name.
Tools = Mapping[str, Mapping[str, Any]]

_IN_STRING = re.compile(r'["\\]')


class ToolFormat(ABC):
    """How one family of models writes tool calls; an instance reads one answer.

    Attributes:
        markers: every marker of the format; none is ever part of an answer's text.
        special_tokens: those of which markers consist, where markers are more than a token.
        grammar: how the format writes calls.
        opening: those after which `read` takes over, also from within reasoning.
        call_end: markers that end a call; within a string of its arguments they do so only
            where a marker or nothing follows, and no other marker does.
        short_ids: the template takes ids of nine letters and digits alone.
        template_texts: a chat template that holds all texts of one of these is of a model that
            writes this format.
        model_types: of `config.json`, whose models write it where the template says nothing.
        own: `markers`, to look for.
        all: `markers` and those of the reasoning format.
        tools: those that the request declared; empty when it did not say.
    """

    markers: ClassVar[tuple[str, ...]]
    special_tokens: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[frozenset[str]]
    grammar: ClassVar[CallGrammar]
    call_end: ClassVar[frozenset[str]] = frozenset()
    short_ids: ClassVar[bool] = False
    template_texts: ClassVar[tuple[tuple[str, ...], ...]] = ()
    model_types: ClassVar[tuple[str, ...]] = ()

    def __init__(self, foreign: tuple[str, ...], tools: Tools) -> None:
        self.own = _markers(self.markers)
        self.all = _markers((*self.markers, *foreign))
        self.tools = tools

    @abstractmethod
    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        """Read on after an opening marker, to where ordinary content goes on.

        Returns:
            The last marker passed when it has a meaning outside of calls too, or None.
        """

    def begin(self, text: TextStream, out: DeltaWriter) -> Steps[None]:
        """Read calls without an opening marker where content begins; most formats have none."""
        del text, out
        yield from ()

    def read_arguments(self, text: TextStream, emit: Emit) -> Steps[str | None]:
        """Read JSON up to the marker that ends the call, and return it."""
        strings = _Strings(emit)
        while True:
            marker = yield from text.until(self.own, strings.feed)
            if marker is None or not strings.is_inside:
                return marker
            if marker in self.call_end and (yield from text.precedes(self.own)):
                return marker
            emit(marker)


@lru_cache
def _markers(strings: tuple[str, ...]) -> Markers:
    return Markers(strings)


class SectionFormat(ToolFormat):
    """Formats whose calls stand in marked sections.

    A section may lack its markers, and a call the marker of its end. Text in a section that
    belongs to no call is left out when the section holds calls, and content otherwise.
    """

    section_end: ClassVar[tuple[str, ...]]
    call_begin: ClassVar[str]

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        marker: str | None = opening
        stray: list[str] = []
        num_calls = out.num_calls
        while marker is not None and marker in self.markers and marker not in self.section_end:
            if marker == self.call_begin:
                marker = yield from self.read_call(text, out)
                if opening == self.call_begin and marker in self.call_end:
                    break  # without a section, what follows may be content
            else:
                marker = yield from text.until(self.all, stray.append)
        if out.num_calls == num_calls and (said := "".join(stray)).strip():
            out.content(said)
        out.marker()
        return marker

    @abstractmethod
    def read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        """Read one call after its first marker; returns the marker that ended it."""


class _Strings:
    """Passes JSON on and knows whether it is within a string."""

    def __init__(self, emit: Emit) -> None:
        self.is_inside = False
        self._emit = emit
        self._is_escaped = False

    def feed(self, text: str) -> None:
        self._emit(text)
        start = 0
        while start < len(text):
            if self._is_escaped:
                self._is_escaped = False
                start += 1
                continue
            match = _IN_STRING.search(text, start)
            if match is None:
                return
            start = match.end()
            if match.group() == '"':
                self.is_inside = not self.is_inside
            else:
                self._is_escaped = self.is_inside
