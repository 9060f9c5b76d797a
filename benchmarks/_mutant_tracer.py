"""A pytest plugin that records which lines of the core each test runs, and how long it takes.

Threads of the test's own process are seen, other processes are not.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

# Of one function in one test: lines that come after so many known ones are missed.
_MOST_EVENTS = 20_000

_Trace = Callable[[FrameType, str, Any], Any]


class _Lines:
    """Of one function: those that have not run yet, and how many lines are still looked at."""

    __slots__ = ("code", "events", "left")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.left = _lines_of(code)
        self.events = _MOST_EVENTS


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}


class LineTracer:
    """Lines of the given files that run.

    Args:
        files: absolute paths.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._files = frozenset(files)
        # By the identity of the code, whose hash is slow.
        self._seen: dict[int, _Lines] = {}

    def start(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def take(self) -> dict[str, list[int]]:
        """The lines of each file that ran since the last call."""
        taken: dict[str, set[int]] = {}
        for lines in list(self._seen.values()):
            ran = _lines_of(lines.code) - lines.left
            taken.setdefault(lines.code.co_filename, set()).update(ran)
        self._seen = {}
        return {path: sorted(lines) for path, lines in taken.items() if lines}

    def _called(self, frame: FrameType, event: str, arg: Any) -> _Trace | None:
        del event, arg
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        lines = self._of(code)
        lines.left.discard(frame.f_lineno)
        if not lines.left or lines.events <= 0:
            return None
        frame.f_trace_lines = True
        return self._ran

    def _ran(self, frame: FrameType, event: str, arg: Any) -> _Trace:
        del event, arg
        lines = self._of(frame.f_code)
        lines.left.discard(frame.f_lineno)
        lines.events -= 1
        if not lines.left or lines.events <= 0:
            frame.f_trace_lines = False
        return self._ran

    def _of(self, code: CodeType) -> _Lines:
        lines = self._seen.get(id(code))
        if lines is None:
            lines = self._seen[id(code)] = _Lines(code)
        return lines


class Recorder:
    """Writes a line of JSON for each test that passes.

    Args:
        files: those whose lines are recorded, relative to the tree.
        output: gets `id`, `seconds` and `lines`, which are of the same relative paths.
    """

    def __init__(self, tree: Path, files: Iterable[str], output: Path) -> None:
        self._paths = {str(tree / name): name for name in files}
        self._tracer = LineTracer(self._paths)
        self._output = output
        self._passed = False

    def pytest_sessionstart(self) -> None:
        self._tracer.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._tracer.take()
        self._passed = True
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        lines = {self._paths[path]: ran for path, ran in self._tracer.take().items()}
        if self._passed and lines:
            record = {"id": item.nodeid, "seconds": round(seconds, 3), "lines": lines}
            with self._output.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed = self._passed and report.passed
