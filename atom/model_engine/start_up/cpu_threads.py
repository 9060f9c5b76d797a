"""How many threads a step on a CPU takes.

The C++ kernels take all: their helpers go and come back within milliseconds as other programs take
processors and leave them (`csrc/team.cpp`), and beside a program that keeps one of two processors
busy both threads are 1.4 times as fast as one. The threads of torch's operations wait for one
another whoever has their processors. Where these run, beside a busy program, fewer are faster.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from atom.distributed.parallel_state import ParallelGroups
from atom.environment import omp_num_threads
from atom.model_ops.kernels.native.build import native_build
from atom.options.parallel import ParallelOptions
from atom.platform import Platform
from atom.processors import default_num_threads

logger = logging.getLogger(__name__)

# Of steps, after which there is a choice.
_WINDOW_SECONDS = 0.1
# What threads may wait for processors in a second of steps: half of what a busy program takes.
_PATIENCE = 0.5
# Of steps with fewer threads, until all are tried again; twice as many after each vain try.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
# Without a step, until all threads are tried again.
_IDLE_SECONDS = 1.0


class ThreadChoice:
    """Chooses from what threads waited in steps.

    Attributes:
        num_threads: the choice, 1 to `most`.
    """

    def __init__(self, most: int) -> None:
        self.num_threads = self._most = most
        self._pause = self._left = 0.0

    def observe(self, stepping: float, waited: float) -> None:
        """Learn from a window.

        Args:
            stepping: seconds of steps.
            waited: seconds for which threads that could run had no processor, of all together.
        """
        lost = waited / stepping
        if self.num_threads < self._most:
            self._left -= stepping
            if self._left <= 0:
                self.num_threads = self._most
        elif lost < _PATIENCE:
            self._pause = 0.0
        elif self._most > 1:
            self.num_threads = max(self._most - max(round(lost), 1), 1)
            self._pause = min(max(2 * self._pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            self._left = self._pause

    def begin(self) -> None:
        """Nothing is known of the processors any more."""
        self.num_threads, self._pause = self._most, 0.0


class AdaptedThreads:
    """Lets torch use the threads that a `ThreadChoice` chooses."""

    def __init__(self, most: int) -> None:
        self._choice = ThreadChoice(most)
        self._stepping = 0.0
        self._waited = waited_seconds()
        self._ended = time.perf_counter()

    def step_ended(self, seconds: float) -> None:
        """Choose again after a tenth of a second of steps; a step took `seconds`."""
        now = time.perf_counter()
        idle, self._ended = now - self._ended - seconds, now
        if idle > _IDLE_SECONDS:
            self._choice.begin()
        else:
            self._stepping += seconds
            if self._stepping < _WINDOW_SECONDS:
                return
            before, self._waited = self._waited, waited_seconds()
            self._choice.observe(self._stepping, max(self._waited - before, 0.0))
        self._stepping = 0.0
        if (number := self._choice.num_threads) != torch.get_num_threads():
            torch.set_num_threads(number)
            logger.info("CPU threads: %d, as other programs leave processors free", number)


def waited_seconds() -> float:
    """For how long threads of this process that could run had no processor, of all together; 0
    where the system does not count it. What ended threads waited goes with them.
    """
    waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited += int(path.read_text().split()[1])
        except (OSError, IndexError):  # it has ended
            continue
    return waited / 1e9


def take_threads(
    options: ParallelOptions, groups: ParallelGroups, platform: Platform
) -> AdaptedThreads | None:
    """Set the number of CPU threads; None if it stays."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    elif groups.num_local > 1:
        torch.set_num_threads(max(default_num_threads() // groups.num_local, 1))
    elif not platform.is_gpu:
        processors = default_num_threads()
        most = min(processors, omp_num_threads() or processors)
        if most < processors:
            logger.info("CPU threads: at most %d of %d, as OMP_NUM_THREADS says", most, processors)
        torch.set_num_threads(most)
        return None if native_build().library is not None else AdaptedThreads(most)
    return None
