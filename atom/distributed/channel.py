"""What both ways of a broadcast share: errors, and how to wait."""

from __future__ import annotations

import os
import time

# Checks without a pause first; a sleep cannot be shorter than about 0.1 ms.
_SPIN_SECONDS = 0.0005
_SHORTEST_SLEEP_SECONDS = 0.00005
_LONGEST_SLEEP_SECONDS = 0.005
# A sleep is this share of the time waited so far, so that it adds little to any wait.
_SLEEP_SHARE = 0.05
# How often one who sleeps until it is woken looks whether it is to close.
NAP_SECONDS = 0.25


class ChannelError(RuntimeError):
    """The channel does not work; it cannot be used any more."""


class ChannelClosedError(ChannelError):
    """The other side, or another thread of this side, has closed the channel."""


class ChannelTimeoutError(ChannelError):
    """Nobody sent, or somebody did not read, in the time allowed."""


class Wait:
    """Time spent on waiting for something, with a time-out (None: without).

    A check right after the event is what latency is made of, and a check in vain costs processor
    time that other ranks may need: there may be more ranks than processors.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        """Something has happened: begin anew, the time-out as well."""
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time has run out."""
        return self._timeout_s is not None and self._waited() >= self._timeout_s

    def limit(self, seconds: float) -> float:
        """`seconds`, or what is left of the time if that is less."""
        if self._timeout_s is None:
            return seconds
        return max(0.0, min(seconds, self._timeout_s - self._waited()))

    def spin(self) -> bool:
        """Let others run before the next check; False when it is time to sleep."""
        if self._waited() >= _SPIN_SECONDS or self.is_over:
            return False
        time.sleep(0)  # other threads
        os.sched_yield()  # other processes
        return True

    def pause(self) -> bool:
        """Spin, then sleep longer and longer between checks; False when the time has run out."""
        if self.is_over:
            return False
        if not self.spin():
            seconds = max(_SLEEP_SHARE * self._waited(), _SHORTEST_SLEEP_SECONDS)
            time.sleep(self.limit(min(seconds, _LONGEST_SLEEP_SECONDS)))
        return True

    def _waited(self) -> float:
        return time.monotonic() - self._began
