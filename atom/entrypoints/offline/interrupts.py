"""Ctrl-C between two steps and not within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from atom.model_engine.llm_engine import LLMEngine


@contextmanager
def interrupts_held(engine: LLMEngine) -> Iterator[None]:
    """Hold Ctrl-C back until the block is left; a second one does not wait for the model.

    Other threads than the main one get none, and a handler that is not Python's is left alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1 and engine.is_computing:
            held.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
