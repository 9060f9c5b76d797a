"""How tests wait: for what they need, and long enough for a machine that is busy with more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

# Nobody waits so long for what works; only what is broken is noticed so late.
PATIENCE_SECONDS = 60.0
_NAP_SECONDS = 0.005


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition; the time is counted in naps, of which a stopped machine takes none."""
    for _ in range(int(seconds / _NAP_SECONDS)):
        if condition():
            return
        time.sleep(_NAP_SECONDS)
    raise AssertionError("it did not happen in time")


async def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """As `wait_until`, while the event loop runs."""
    for _ in range(int(seconds / _NAP_SECONDS)):
        if condition():
            return
        await asyncio.sleep(_NAP_SECONDS)
    raise AssertionError("it did not happen in time")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its status yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
