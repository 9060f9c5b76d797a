"""Threads for what would hold the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# Work on less (bytes, characters or tokens) takes about a millisecond, less than a visit to a
# thread is worth.
MAX_INLINE = 4000
# Enough that one client's large requests leave room for another's.
NUM_THREADS = 4


class Workers:
    """Runs small work at once and large work in a thread."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="request")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of `work`, which goes through `size` bytes, characters or tokens.

        Raises:
            Exception: what `work` raises.
        """
        if size <= MAX_INLINE:
            return work()
        return await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[], Result]) -> Result:
        """The same of work that may wait for something, or take long whatever its size.

        Raises:
            Exception: what `work` raises.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Forget what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
