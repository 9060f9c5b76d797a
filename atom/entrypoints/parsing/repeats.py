"""Answers that must hold calls and go on repeating one: they end there."""

from __future__ import annotations

from collections.abc import Iterable

from atom.entrypoints.parsing.deltas import ChatDelta


class RepeatFilter:
    """Lets deltas pass up to the first call that repeats an earlier one, name and arguments.

    A call is held back while it may still turn out to be a repetition.

    Attributes:
        is_closed: a repetition has come, and nothing passes any more.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._earlier: list[tuple[str, str]] = []
        self._name = ""
        self._arguments: list[str] = []
        self._length = 0
        # Earlier calls that the one that is held back may repeat.
        self._alike: list[tuple[str, str]] = []
        self._held: list[ChatDelta] = []

    def take(self, deltas: Iterable[ChatDelta]) -> list[ChatDelta]:
        passed: list[ChatDelta] = []
        for delta in deltas:
            if delta.tool_calls is None or delta.tool_calls[0].id is not None:
                passed += self._end_call()
            if not self.is_closed:
                passed += self._take(delta)
        return passed

    def finish(self) -> list[ChatDelta]:
        """Nothing follows; returns the rest."""
        return self._end_call()

    def _take(self, delta: ChatDelta) -> list[ChatDelta]:
        if delta.tool_calls is None:
            return [delta]
        (piece,) = delta.tool_calls
        if piece.id is not None:
            self._name = piece.function.name or ""
            self._alike = [call for call in self._earlier if call[0] == self._name]
        text = piece.function.arguments
        start, self._length = self._length, self._length + len(text)
        self._arguments.append(text)
        self._alike = [call for call in self._alike if call[1].startswith(text, start)]
        self._held.append(delta)
        return [] if self._alike else self._release()

    def _end_call(self) -> list[ChatDelta]:
        if not self._name:
            return []
        call = (self._name, "".join(self._arguments))
        self._name, self._arguments, self._length = "", [], 0
        if call in self._earlier:
            self.is_closed = True
            self._held.clear()
        self._earlier.append(call)
        return self._release()

    def _release(self) -> list[ChatDelta]:
        held, self._held = self._held, []
        return held
