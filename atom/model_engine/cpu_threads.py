"""How many threads a step on the CPU takes: as many as other programs leave processors free.

The threads of an operation wait for one another, so one whose processor somebody else uses holds
up all of them: beside a busy program, fewer threads are faster than one too many. Beside many, no
processor is free; each thread gets its share of one, and more threads get more.
"""

from __future__ import annotations

import logging
import time

import torch

from atom.distributed.place import Place
from atom.environment import omp_num_threads
from atom.parallel_options import ParallelOptions
from atom.platform import Platform, busy_cpu_seconds, default_num_threads

logger = logging.getLogger(__name__)

# Long enough for processor times, which are counted in hundredths of a second.
_WINDOW_SECONDS = 0.5
# A thread's processor is taken when others use so much of it, and free again below the second.
_TAKEN, _FREE = 0.5, 0.25
# Windows in a row that must speak for more threads before there are more.
_SURE = 2
# Stepping back pays only where each thread that is left gets this share of a processor.
_WORTH = 0.6


class ThreadChoice:
    """Chooses from processor times alone.

    Attributes:
        num_threads: the choice, 1 to `most`.

    Args:
        processors: for all programs.
        most: as many as there are processors when left out.
    """

    def __init__(self, processors: int, most: int | None = None) -> None:
        self._processors = processors
        self.num_threads = self._most = min(processors, most or processors)
        self._windows_with_more = 0

    def observe(self, seconds: float, stepping: float, busy: float, own: float) -> None:
        """Learn from a window that has ended.

        Args:
            seconds: its length.
            stepping: how much of it steps took.
            busy: processor seconds that were used in it, by everybody.
            own: those that this process used.
        """
        others = max(busy - own, 0.0) / seconds
        # What a thread that wants a processor gets of one, ours and theirs alike.
        share = min(own / (stepping * self.num_threads), 1.0) if stepping and own else 1.0
        rivals = others / share
        more = self._choose(others, rivals, _FREE)
        self._windows_with_more = self._windows_with_more + 1 if more > self.num_threads else 0
        if self._windows_with_more == _SURE:
            self.num_threads, self._windows_with_more = more, 0
        else:
            self.num_threads = min(self.num_threads, self._choose(others, rivals, _TAKEN))

    def _choose(self, others: float, rivals: float, slack: float) -> int:
        number = min(max(int(self._processors - others + slack), 1), self._most)
        return number if self._processors / (number + rivals) >= _WORTH else self._most


class AdaptedThreads:
    """Lets torch use the threads that a `ThreadChoice` chooses.

    What was measured while the engine was built counts for the first choice.
    """

    def __init__(self) -> None:
        processors = default_num_threads()
        self._choice = ThreadChoice(processors, omp_num_threads())
        if (most := self._choice.num_threads) < processors:
            logger.info("CPU threads: at most %d of %d, as OMP_NUM_THREADS says", most, processors)
        torch.set_num_threads(self._choice.num_threads)
        self._window = self._now()
        self._stepping = 0.0

    def step_ended(self, seconds: float) -> None:
        """Choose again, half a second after the last choice; a step took `seconds`."""
        self._stepping += seconds
        started, busy, own = self._window
        if time.perf_counter() - started < _WINDOW_SECONDS:
            return
        now = self._window = self._now()
        before = self._choice.num_threads
        self._choice.observe(now[0] - started, self._stepping, now[1] - busy, now[2] - own)
        self._stepping = 0.0
        if (after := self._choice.num_threads) != before:
            torch.set_num_threads(after)
            logger.info("CPU threads: %d, as other programs leave processors free", after)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), busy_cpu_seconds(), time.process_time()


def take_threads(
    options: ParallelOptions, place: Place, platform: Platform
) -> AdaptedThreads | None:
    """Set the number of CPU threads; None if it will not follow what other programs leave."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    elif place.num_local > 1:
        torch.set_num_threads(max(default_num_threads() // place.num_local, 1))
    elif not platform.is_gpu:
        return AdaptedThreads()
    return None
