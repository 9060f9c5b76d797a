"""A pytest plugin that records which lines of the core each test runs, and how long it takes.

The core's files are compiled with a mark before each statement of a function, which sets a byte:
that costs a test far less than a trace of its lines. Threads of the test's own process are seen,
other processes are not.
"""

from __future__ import annotations

import ast
import builtins
import json
import time
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import numpy as np
import pytest
from _mutant_runs import seconds_of

# What marks are written to, by a name that every module finds.
_RAN = "__lines_that_ran__"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class MarkedFiles:
    """Python files compiled so that the statements of their functions tell when they run.

    Args:
        files: absolute paths.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._codes: dict[str, CodeType] = {}
        self._firsts: list[int] = []
        end = 0
        for name in files:
            source = Path(name).read_bytes()
            self._codes[name] = compile(with_marks(source, end), name, "exec", dont_inherit=True)
            self._firsts.append(end)
            end += source.count(b"\n") + 2
        self._ran = bytearray(end)

    def install(self) -> None:
        """Let imports in this process find them so compiled."""
        setattr(builtins, _RAN, self._ran)
        codes, get_code = self._codes, SourceFileLoader.get_code

        def get_marked(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            return codes.get(loader.path) or get_code(loader, fullname)

        SourceFileLoader.get_code = get_marked  # type: ignore[assignment, method-assign]

    def take(self) -> dict[str, list[int]]:
        """The lines of each file on which a statement began since the last call."""
        places = np.flatnonzero(np.frombuffer(self._ran, dtype=np.uint8))
        self._ran[:] = bytes(len(self._ran))
        taken: dict[str, list[int]] = {}
        names, firsts = list(self._codes), np.array(self._firsts)
        files = np.searchsorted(firsts, places, side="right") - 1
        for place, file in zip(places.tolist(), files.tolist(), strict=True):
            taken.setdefault(names[file], []).append(place - self._firsts[file])
        return taken


def with_marks(source: bytes, first: int) -> ast.Module:
    """A file with a mark before each statement of its functions.

    Args:
        first: the mark's number of line 0.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            _mark_blocks(node, first)
    return ast.fix_missing_locations(tree)


def _mark_blocks(node: ast.AST, first: int) -> None:
    """Mark the statements in a node; functions and classes in it are left to themselves."""
    for field, value in ast.iter_fields(node):
        if not isinstance(value, list) or not value:
            continue
        for inner in value:
            is_block = isinstance(inner, (ast.stmt, ast.ExceptHandler, ast.match_case))
            if is_block and not isinstance(inner, (*_FUNCTIONS, ast.ClassDef)):
                _mark_blocks(inner, first)
        if isinstance(value[0], ast.stmt):
            has_doc = isinstance(node, _FUNCTIONS) and ast.get_docstring(node) is not None
            kept = value[:1] if field == "body" and has_doc else []
            marked = [part for stmt in value[len(kept) :] for part in (_mark(stmt, first), stmt)]
            setattr(node, field, [*kept, *marked])


def _mark(stmt: ast.stmt, first: int) -> ast.stmt:
    target = ast.Subscript(
        ast.Name(_RAN, ast.Load()), ast.Constant(first + stmt.lineno), ast.Store()
    )
    return ast.copy_location(ast.Assign([target], ast.Constant(1)), stmt)


class Recorder:
    """Writes a line of JSON for each test that passes.

    Args:
        marked: the files whose lines are recorded, below the tree.
        output: gets `id`, `seconds` and `lines`, which are of paths relative to the tree.
    """

    def __init__(self, tree: Path, marked: MarkedFiles, output: Path) -> None:
        self._tree, self._marked, self._output = tree, marked, output
        self._passed = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._marked.take()
        self._passed = True
        used, start = time.process_time(), time.monotonic()
        yield
        seconds = seconds_of(time.process_time() - used, time.monotonic() - start)
        taken = self._marked.take().items()
        lines = {str(Path(path).relative_to(self._tree)): ran for path, ran in taken}
        if self._passed and lines:
            record = {"id": item.nodeid, "seconds": round(seconds, 3), "lines": lines}
            with self._output.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed = self._passed and report.passed
