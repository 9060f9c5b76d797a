"""Grammars that take minutes to compile, and processes that compile."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from atom import StructuredOutput

PATIENCE_SECONDS = 60.0


def hard(number: int) -> StructuredOutput:
    """A regular expression of 4400 characters that keeps xgrammar busy for minutes."""
    repeated = "".join(f".{{0,{100 + i}}}x.*" for i in range(400))
    return StructuredOutput.regex(f"{number}.*{repeated}")


def easy(number: int) -> StructuredOutput:
    return StructuredOutput.regex(f"[a-z]{{1,5}}{number}")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def workers(pid: int | None) -> list[psutil.Process]:
    """The processes that compile for a process of trials."""
    return psutil.Process(pid).children()


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
