"""When a replica that died is started again, and when no more."""

from __future__ import annotations

# Seconds before each restart; after as many within the window there is none.
DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0)
WINDOW_SECONDS = 600.0


class RestartPolicy:
    """The failures of one replica. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._failures: list[float] = []

    def failed(self, now: float) -> float | None:
        """Note a failure; returns how long to wait before a restart, None to give up."""
        self._failures = [time for time in self._failures if now - time < WINDOW_SECONDS]
        self._failures.append(now)
        number = len(self._failures)
        return DELAYS[number - 1] if number <= len(DELAYS) else None
