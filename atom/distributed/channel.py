"""What both sides of a broadcast share: errors, and how to wait."""

from __future__ import annotations

import time

# How often one who waits looks whether it is to close.
NAP_SECONDS = 0.25


class ChannelError(RuntimeError):
    """The channel does not work; it cannot be used any more."""


class ChannelClosedError(ChannelError):
    """The other side, or another thread of this side, has closed the channel."""


class ChannelTimeoutError(ChannelError):
    """Nobody sent, or somebody did not read, in the time allowed."""


class Wait:
    """Time spent on waiting for something, with a time-out (None: without)."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def is_over(self) -> bool:
        """Whether the time has run out."""
        return self._end is not None and time.monotonic() >= self._end

    def limit(self, seconds: float) -> float:
        """`seconds`, or what is left of the time if that is less."""
        if self._end is None:
            return seconds
        return max(0.0, min(seconds, self._end - time.monotonic()))
