"""Wakes a process of the same machine that sleeps, and tells when either side has died.

A pipe without content: the one who wakes holds its writing end, the sleeper its reading end, which
it opens through the other's files in /proc. The kernel tells each side when the other is gone.
"""

from __future__ import annotations

import math
import os
import select
import sys


class Doorbell:
    """The side that wakes the other."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError(f"doorbells need Linux, and this is {sys.platform}")
        # Held until the sleeper has opened it.
        self._reading: int | None
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.descriptor = self._reading

    def let_go(self) -> None:
        """Call it when the sleeper has opened the bell; from then on its death is noticed."""
        if self._reading is not None:
            os.close(self._reading)
            self._reading = None

    def ring(self) -> None:
        try:
            os.write(self._writing, b"\0")
        except (BlockingIOError, BrokenPipeError):
            return  # it was rung often enough, or nobody is there

    @property
    def is_deserted(self) -> bool:
        """Whether the sleeper is gone."""
        poll = select.poll()
        poll.register(self._writing, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.let_go()
        os.close(self._writing)


class Sleeper:
    """The side that sleeps until the bell is rung.

    Args:
        path: of the bell's `descriptor` in /proc.

    Raises:
        OSError: when the other process is gone or belongs to another user.
    """

    def __init__(self, path: str) -> None:
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Sleep until the bell is rung; False when the other side is gone."""
        for _, event in self._poll.poll(math.ceil(1000 * seconds)):
            if event & select.POLLIN:
                os.read(self._reading, 4096)
            elif event & select.POLLHUP:
                return False
        return True

    def close(self) -> None:
        os.close(self._reading)
