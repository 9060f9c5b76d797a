"""How many threads a step on the CPU takes: as many as other programs leave processors free.

The threads of an operation wait for one another, so one whose processor somebody else uses holds
up all of them: beside a busy program, fewer threads are much faster than one too many.
"""

from __future__ import annotations

import logging
import time

import torch

from atom.platform import busy_cpu_seconds, default_num_threads

logger = logging.getLogger(__name__)

# Long enough for processor times, which are counted in hundredths of a second.
_WINDOW_SECONDS = 0.5
# A thread's processor is taken when others use so much of it, and free again below the second.
_TAKEN, _FREE = 0.5, 0.25
# Windows in a row that must show a free processor before it is used again.
_SURE = 2


class ThreadChoice:
    """Chooses from processor times alone.

    Attributes:
        num_threads: the choice, 1 to `most`.
    """

    def __init__(self, most: int) -> None:
        self.num_threads = most
        self._most = most
        self._windows_with_more = 0

    def observe(self, seconds: float, busy: float, own: float) -> None:
        """Learn from a window that has ended.

        Args:
            seconds: its length.
            busy: processor seconds that were used in it, by everybody.
            own: those that this process used.
        """
        free = self._most - max(busy - own, 0.0) / seconds
        more = self._within(free + _FREE)
        self._windows_with_more = self._windows_with_more + 1 if more > self.num_threads else 0
        if self._windows_with_more == _SURE:
            self.num_threads, self._windows_with_more = more, 0
        else:
            self.num_threads = min(self.num_threads, self._within(free + _TAKEN))

    def _within(self, number: float) -> int:
        return min(max(int(number), 1), self._most)


class AdaptedThreads:
    """Lets torch use the threads that a `ThreadChoice` chooses.

    What was measured while the engine was built counts for the first choice.
    """

    def __init__(self) -> None:
        self._choice = ThreadChoice(default_num_threads())
        torch.set_num_threads(self._choice.num_threads)
        self._window = self._now()

    def adapt(self) -> None:
        """Choose again, where the last choice is half a second old."""
        started, busy, own = self._window
        if time.perf_counter() - started < _WINDOW_SECONDS:
            return
        now = self._window = self._now()
        before = self._choice.num_threads
        self._choice.observe(now[0] - started, now[1] - busy, now[2] - own)
        if (after := self._choice.num_threads) != before:
            torch.set_num_threads(after)
            logger.info("CPU threads: %d, as other programs leave processors free", after)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), busy_cpu_seconds(), time.process_time()
