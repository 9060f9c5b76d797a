"""How much processor time others took meanwhile, and a neighbour who takes some on purpose."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")
# user, nice, system, irq, softirq and steal in the first line of /proc/stat.
_WORK = (0, 1, 2, 5, 6, 7)


class OtherWork:
    """Processor seconds, since it was made, of all but some processes, those that they started,
    and this one. Linux only.
    """

    def __init__(self, ours: Collection[int]) -> None:
        self._ours = [os.getpid(), *ours, *(child for pid in ours for child in _children(pid))]
        self._start, self._started = self._others(), time.monotonic()

    def cores(self) -> float:
        """How many processors others kept busy, on average."""
        return (self._others() - self._start) / (time.monotonic() - self._started)

    def _others(self) -> float:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        ticks = sum(int(fields[i]) for i in _WORK)
        return (ticks - sum(map(_ticks_of, self._ours))) / _TICKS


def _ticks_of(pid: int) -> int:
    # The name may hold anything; the numbers follow the last bracket.
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(numbers[11]) + int(numbers[12])


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@contextlib.contextmanager
def neighbour() -> Iterator[int]:
    """A process that keeps one processor busy, the last of those this one may use; its id."""
    processor = max(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        time.sleep(0.2)
        yield process.pid
    finally:
        process.kill()
        process.wait()
