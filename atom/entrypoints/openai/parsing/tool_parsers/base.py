"""What a format of tool calls is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from atom.entrypoints.openai.chat.deltas import DeltaWriter
from atom.entrypoints.openai.parsing.text_stream import Markers, Steps, TextStream
from atom.entrypoints.openai.parsing.tool_parsers.call_grammar import CallGrammar


class ToolFormat(ABC):
    """How one family of models writes tool calls; an instance reads one answer.

    Attributes:
        markers: every marker of the format; none is ever part of an answer's text.
        grammar: how the format writes calls.
        opening: those after which `read` takes over, also from within reasoning.
        own: `markers`, to look for.
        all: `markers` and those of the reasoning format.
        tool_names: the tools that the request declared; empty when it did not say.
    """

    markers: ClassVar[tuple[str, ...]]
    opening: ClassVar[frozenset[str]]
    grammar: ClassVar[CallGrammar]

    def __init__(self, foreign: tuple[str, ...], tool_names: frozenset[str]) -> None:
        self.own = Markers(self.markers)
        self.all = Markers((*self.markers, *foreign))
        self.tool_names = tool_names

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


class SectionFormat(ToolFormat):
    """Formats whose calls stand in marked sections, with nothing but white space between them.

    A section may lack its markers, and a call the marker of its end.
    """

    section_end: ClassVar[tuple[str, ...]]
    call_begin: ClassVar[str]

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        marker: str | None = opening
        while marker is not None and marker in self.markers and marker not in self.section_end:
            if marker == self.call_begin:
                marker = yield from self.read_call(text, out)
            else:
                out.marker()
                marker = yield from text.until(self.all, out.content)
        out.marker()
        return marker

    @abstractmethod
    def read_call(self, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        """Read one call after its first marker; returns the marker that ended it."""
