"""How much Python does, counted: the same on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_lines(do: Callable[[], object]) -> int:
    """Lines of Python that a function executes, with those that it calls; each item that a
    generator yields is one at least. Loops in C, like `sorted`, count for nothing.
    """
    lines = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal lines
        lines += event != "return"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return lines
