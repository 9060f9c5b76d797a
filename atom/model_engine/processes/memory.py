"""Memory of the process that nothing uses."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_back_memory() -> None:
    """Return what was freed to the system, from between what is still used, too.

    glibc keeps it for later: an engine that has met many batches and grammars would hold the most
    that it ever needed. Other C libraries do this by themselves, or not at all.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
