"""Reads weight files into the page cache, one file ahead of the loader."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_BUFFER_BYTES = 8 << 20


class ReadAhead:
    """Reads files sequentially, in order, in a background thread.

    Page faults of a memory map fetch small pieces in access order, each a round trip on network
    storage; sequential reads use the full bandwidth. At most one file is read ahead, so that a
    checkpoint larger than memory does not evict its own pages.
    """

    def __init__(self, files: Sequence[Path], enabled: bool) -> None:
        self._waiting = list(files) if enabled else []
        self._running: dict[Path, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> ReadAhead:
        self._start_next()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def wait_for(self, file: Path) -> None:
        """Wait until the file is in the page cache; then the next one is read."""
        reading = self._running.pop(file, None)
        if reading is not None:
            reading.result()
            self._start_next()

    def _start_next(self) -> None:
        if self._waiting:
            file = self._waiting.pop(0)
            self._running[file] = self._pool.submit(_read, file)


def _read(file: Path) -> None:
    buffer = bytearray(_BUFFER_BYTES)
    with file.open("rb", buffering=0) as handle:
        if sys.platform == "linux":
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        while handle.readinto(buffer):
            pass
