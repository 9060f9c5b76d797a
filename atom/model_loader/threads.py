"""How torch's own threads and the loader's threads share the processors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch operations in the calling thread, and in threads started meanwhile, alone.

    Copies and conversions are bound by memory: splitting each over all processors only adds
    barriers, which are slow when the loader's own threads already occupy the processors.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
