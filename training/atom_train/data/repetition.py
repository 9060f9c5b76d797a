"""Detects repetition: loops, which small models fall into, are useless as training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_LOOP_SIZE = 6
_LOOP_COUNT = 4


class LoopDetector:
    """Detects loops in a growing text: the same six tokens for the fourth time."""

    def __init__(self) -> None:
        self._window: list[int] = []
        self._counts: Counter[tuple[int, ...]] = Counter()

    def feed(self, token_ids: Iterable[int]) -> bool:
        """Append tokens; returns whether the text is looping."""
        looping = False
        for token_id in token_ids:
            self._window = [*self._window[1 - _LOOP_SIZE :], token_id]
            if len(self._window) == _LOOP_SIZE:
                window = tuple(self._window)
                self._counts[window] += 1
                looping = looping or self._counts[window] >= _LOOP_COUNT
        return looping
