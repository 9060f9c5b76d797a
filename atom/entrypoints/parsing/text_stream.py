"""Text that arrives in pieces, for parsers written as if it were all there.

A parser is a generator that reads a `TextStream` with `yield from`; it is suspended while the
text it needs has not come. What it decides depends on the text alone, never on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Emit = Callable[[str], None]

SPACE = " \t\r\n"
_NO_SPACE = re.compile(r"[^ \t\r\n]")


def ignore(text: str) -> None:
    """An `Emit` for text that nobody needs."""
    del text


class Markers:
    """Strings to look for, all at once.

    Raises:
        ValueError: when one is the start of another: which one has come could then depend on
            where the text is cut.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        strings = tuple(dict.fromkeys(markers))
        for marker in strings:
            if not marker or any(o != marker and o.startswith(marker) for o in strings):
                raise ValueError(f"marker {marker!r} is empty or the start of another: {strings}")
        self._pattern = re.compile("|".join(map(re.escape, strings)) if strings else r"(?!)")
        self._starts = frozenset(m[:n] for m in strings for n in range(1, len(m)))
        self._reach = max(map(len, strings), default=1) - 1

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def without(self, text: str) -> str:
        """The text without them."""
        return self._pattern.sub("", text)

    def next_after(self, text: str, start: int) -> bool | None:
        """Whether a marker, or nothing, follows `start`; None while that is not certain."""
        if self._pattern.match(text, start):
            return True
        rest = text[start : start + self._reach + 1]
        return None if not rest or rest in self._starts else False

    def settled(self, text: str, start: int) -> int:
        """Where the longest end of `text` begins that may still become a marker."""
        for i in range(max(start, len(text) - self._reach), len(text)):
            if text[i:] in self._starts:
                return i
        return len(text)


class TextStream:
    """The text of one answer; `push` adds to it, `end` says that nothing follows."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._ended = False

    @property
    def at_end(self) -> bool:
        """Whether all has been read and nothing follows."""
        return self._ended and self._start == len(self._text)

    def push(self, text: str) -> None:
        self._text = self._text[self._start :] + text
        self._start = 0

    def end(self) -> None:
        self._ended = True

    def until(self, markers: Markers, emit: Emit) -> Steps[str | None]:
        """Emit the text before the next marker and return it; None at the end of the text."""
        while True:
            match = markers.find(self._text, self._start)
            if match is not None:
                self._move_to(match.start(), emit)
                self._start = match.end()
                return match.group()
            settled = markers.settled(self._text, self._start)
            self._move_to(len(self._text) if self._ended else settled, emit)
            if self._ended:
                return None
            yield

    def scan(self, find: Callable[[str, int], int], emit: Emit) -> Steps[bool]:
        """Emit the text up to where `find` says, as it comes; False at the end of the text.

        Args:
            find: (text, start) -> the end of what is looked for, -1 when it goes on; it sees
                every character once.
        """
        while True:
            end = find(self._text, self._start)
            self._move_to(len(self._text) if end < 0 else end, emit)
            if end >= 0:
                return True
            if self._ended:
                return False
            yield

    def skip_space(self, emit: Emit = ignore) -> Steps[str]:
        """Pass over white space; returns the character after it, "" at the end of the text."""
        found = yield from self.scan(_not_space, emit)
        return self._text[self._start] if found else ""

    def accept(self, literal: str) -> Steps[bool]:
        """Pass over `literal`, or the begin of it that ends the text, when it comes next."""
        while True:
            rest = self._text[self._start : self._start + len(literal)]
            if not literal.startswith(rest):
                return False
            if self._ended or rest == literal:
                self._start += len(rest)
                return rest != ""
            yield

    def accept_whole(self, literal: str) -> Steps[bool]:
        """Pass over `literal` when it comes next, whole."""
        while True:
            if self._text.startswith(literal, self._start):
                self._start += len(literal)
                return True
            if self._ended or not literal.startswith(self._text[self._start :]):
                return False
            yield

    def precedes(self, markers: Markers) -> Steps[bool]:
        """Whether white space and then a marker, or the text's end, follow; passes nothing.

        The begin of a marker counts where the text ends with it.
        """
        while True:
            start = _not_space(self._text, self._start)
            start = len(self._text) if start < 0 else start
            found = markers.next_after(self._text, start)
            if found is not None:
                return found
            if self._ended:
                return True
            yield

    def _move_to(self, end: int, emit: Emit) -> None:
        if end > self._start:
            emit(self._text[self._start : end])
            self._start = end


def _not_space(text: str, start: int) -> int:
    match = _NO_SPACE.search(text, start)
    return -1 if match is None else match.start()
