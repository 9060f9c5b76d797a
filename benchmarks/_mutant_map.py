"""Which tests run a line of the core, and what they take: recorded once, and kept."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _mutant_recorder import MarkedFiles, Recorder
from _mutant_runs import Pace, Runner
from _mutants import Mutant

# For what is imported and collected before the first test.
_SECONDS_TO_START = 60.0
# Tests that are tried before further files are read.
_FIRST_TESTS = 5
_OURS = ("atom", "tests", "conftest", "__main__", "__mp_main__", "mutations", "_mutant", "_chaos")


@dataclass(frozen=True)
class Test:
    """A test that runs a line, and the seconds that it took when that was recorded."""

    file: str
    id: str
    seconds: float


class LineMap:
    """What each test runs, by test file; a file is recorded again once it, or a source that it
    runs, has changed.

    Args:
        path: where it is kept.
        sources: files whose lines are looked at, relative to the tree.
        limit: seconds for each test file, and as many again from its end; tests between these are
            not known.
    """

    def __init__(
        self, path: Path, tree: Path, sources: Iterable[str], runner: Runner, limit: float
    ) -> None:
        self._path, self._tree, self._runner, self._limit = path, tree, runner, limit
        self._sources = sorted(sources)
        self._marked: MarkedFiles | None = None
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def record(self, files: Sequence[str]) -> None:
        """Record the test files that are not known as they are now, and import what they need."""
        for number, file in enumerate(files, start=1):
            if self._is_known(file):
                continue
            entry = self._known[file] = self._recorded(file)
            self._runner.warm_up(entry["modules"])
            self._path.write_text(json.dumps(self._known))
            found = f"{len(entry['tests'])} tests in {entry['seconds']:.1f} s"
            cut = ", and more than there was time for" if entry["cut"] else ""
            print(f"map {number}/{len(files)} {file}: {found}{cut}", flush=True)
        self._known = {file: e for file, e in self._known.items() if self._is_known(file)}
        for entry in self._known.values():
            self._runner.warm_up(entry["modules"])

    def tests_of(self, mutant: Mutant) -> list[Test]:
        """The tests that run what is changed, the fastest first; for what an import runs, those
        that run anything of its file.
        """
        wanted = set(range(mutant.first, mutant.last + 1))
        found = []
        for file, entry in self._known.items():
            for test in entry["tests"]:
                lines = test["lines"].get(mutant.path, ())
                if lines and (not mutant.function or not wanted.isdisjoint(lines)):
                    found.append(Test(file, test["id"], test["seconds"]))
        return sorted(found, key=lambda test: test.seconds)

    def slowest(self, file: str) -> float:
        """The seconds of a file's slowest test; any of its tests may be the one that waits for what
        they share.
        """
        seconds: list[float] = [test["seconds"] for test in self._known[file]["tests"]]
        return max(seconds)

    def _is_known(self, file: str) -> bool:
        entry = self._known.get(file)
        return entry is not None and entry["digest"] == self._digest(file, entry["sources"])

    def _recorded(self, file: str) -> dict[str, Any]:
        output = self._path.with_name("recorded.jsonl")
        output.write_text("")
        if self._marked is None:
            self._marked = MarkedFiles(str(self._tree / name) for name in self._sources)
        recorder = Recorder(self._tree, self._marked, output)
        modules = self._path.with_name("modules.json")
        modules.write_text("[]")
        seconds, failed, cut = 0.0, [], False
        # Where there is no time for all, the last ones are as good as the first.
        for backwards in (False, True):
            recording = _Recording(recorder, self._marked, modules, backwards)
            ran = self._runner.run(
                [file], self._limit, recording, keep_going=True, write_bytecode=True
            )
            seconds, cut = seconds + ran.seconds, ran.timed_out
            if not cut:
                failed = ran.failed
                break
        by_id = {test["id"]: test for test in map(json.loads, output.read_text().splitlines())}
        tests = list(by_id.values())
        sources = sorted({source for test in tests for source in test["lines"]})
        return {
            "digest": self._digest(file, sources),
            "sources": sources,
            "seconds": round(seconds, 1),
            "cut": cut,
            "failed": failed,
            "modules": json.loads(modules.read_text()),
            "tests": tests,
        }

    def _digest(self, file: str, sources: Iterable[str]) -> str:
        digest = hashlib.sha256()
        for name in (file, *sources):
            path = self._tree / name
            digest.update(path.read_bytes() if path.exists() else b"")
        return digest.hexdigest()


class _Recording:
    """A plugin: the recorder, and what is imported once all tests are collected.

    Args:
        backwards: whether the last test runs first.
    """

    def __init__(
        self, recorder: Recorder, marked: MarkedFiles, modules: Path, backwards: bool
    ) -> None:
        self._recorder, self._marked = recorder, marked
        self._modules, self._backwards = modules, backwards

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        # These may import the core.
        self._marked.install()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._backwards:
            items.reverse()

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._recorder)

    def pytest_collection_finish(self) -> None:
        names = [n for n, m in sys.modules.items() if _is_shared(n, m)]
        self._modules.write_text(json.dumps(names))


def _is_shared(name: str, module: Any) -> bool:
    """Whether a module is installed, and so not mutated, nor of the tests."""
    file = getattr(module, "__file__", None) or ""
    return not name.startswith(_OURS) and ("site-packages" in file or "/lib/python" in file)


class Chosen:
    """A plugin that runs the given tests only, in their order.

    Args:
        limits: of each test by its id the seconds that it may take; those of a file follow each
            other, so that they share its fixtures.

    Attributes:
        pace: tells which test runs.
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits
        self._places = {name: place for place, name in enumerate(limits)}
        self.pace = Pace(_SECONDS_TO_START)

    @property
    def newest(self) -> str:
        """The test that ran last, if there was one."""
        number, _ = self.pace.newest
        return list(self._limits)[number - 1] if number else ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._places]
        items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.pace.begin(self._limits[nodeid])


def choose_tests(tests: Sequence[Test], most_seconds: float) -> tuple[list[Test], float]:
    """The fastest tests that take `most_seconds` together, at least one, by files, the fastest file
    first -> tests, seconds.
    """
    chosen: list[Test] = []
    total = 0.0
    for test in tests:
        if chosen and total + test.seconds > most_seconds:
            break
        chosen.append(test)
        total += test.seconds
    files: dict[str, float] = {}
    for test in chosen:
        files[test.file] = files.get(test.file, 0.0) + test.seconds
    return sorted(chosen, key=lambda test: (files[test.file], test.file, test.seconds)), total


def in_parts(tests: Sequence[Test]) -> list[Sequence[Test]]:
    """The first files, with some tests, and the others: to import and collect these takes time that
    is only needed if none of those fails.
    """
    first = list(dict.fromkeys(test.file for test in tests[:_FIRST_TESTS]))
    count = sum(test.file in first for test in tests)
    return [part for part in (tests[:count], tests[count:]) if part]
