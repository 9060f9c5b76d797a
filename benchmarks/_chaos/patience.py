"""How long this program waits for what should happen, on a busy machine and while it is stopped."""

from __future__ import annotations

import threading
import time

_TICK_SECONDS = 0.5
# A thread that sleeps for a tick and comes back so late was stopped with all that it measures.
_STOPPED_SECONDS = 5.0
# After which a server has noticed that its engine answers again.
_RECOVERY_SECONDS = 30.0

_factor = 1.0


def be_patient(factor: float) -> None:
    """Multiply all limits; for machines that others use."""
    global _factor
    _factor = factor


def patient(seconds: float) -> float:
    return seconds * _factor


class Stops:
    """When this program, and so whatever shares its processors, did not run.

    Attributes:
        spans: each from and until when, seconds, `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def met(self, start: float, end: float) -> bool:
        """Whether one fell into, or shortly before, a time."""
        return any(a < end and start < b + _RECOVERY_SECONDS for a, b in list(self.spans))

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in list(self.spans))

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - last > _STOPPED_SECONDS:
                self.spans.append((last, now))
            last = now
