"""Limits torch's threads while the loader's own threads run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch


@contextlib.contextmanager
def single_threaded_pool(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that run torch operations single-threaded, unlike the caller's meanwhile.

    Copies and conversions are bound by memory bandwidth: splitting each over all cores only adds
    barriers, which are slow while the loader's own threads occupy the cores.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            num_threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool
    finally:
        # New threads take over what was set last.
        torch.set_num_threads(before)
