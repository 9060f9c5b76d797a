"""pytest that writes down each test as it ends, and does not run again what it has written.

    python benchmarks/_gpu_ended.py FILE [ARGS]         ARGS as for pytest

A run that is stopped leaves FILE, and the next one goes on with the tests that are not in it. There
is a line of JSON for each: `name` (with which pytest runs it alone), `outcome` (passed, failure,
error or skipped), `seconds` and `message`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]


def read_ended(path: Path) -> list[dict[str, Any]]:
    """The tests in the file, in order; a line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Ended:
    """A plugin of pytest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = {test["name"] for test in read_ended(path)}
        self._running: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        before = self._before
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
        items[:] = [item for item in items if item.nodeid not in before]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self._before:
            test = {"name": report.nodeid, "outcome": "error", "seconds": 0.0}
            self._write({**test, "message": _message(report)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call and tear-down each have a report."""
        passed = {"name": report.nodeid, "outcome": "passed", "seconds": 0.0, "message": ""}
        test = self._running.setdefault(report.nodeid, passed)
        test["seconds"] += report.duration
        if not report.passed:
            failed = "failure" if report.when == "call" else "error"
            test["outcome"] = "skipped" if report.skipped else failed
            test["message"] = _message(report)
        if report.when == "teardown":
            self._write(self._running.pop(report.nodeid))

    def _write(self, test: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(test) + "\n")


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    """What failed, or why it was skipped."""
    what = report.longrepr
    if isinstance(what, tuple):
        return what[2].removeprefix("Skipped: ")
    crash = getattr(what, "reprcrash", None)
    return str(what) if crash is None else str(crash.message)


def main() -> int:
    import pytest

    sys.path[0] = str(ROOT)  # as `python -m pytest` has it
    path, *args = sys.argv[1:]
    return int(pytest.main(args, plugins=[Ended(Path(path))]))


if __name__ == "__main__":
    sys.exit(main())
