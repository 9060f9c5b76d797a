"""Tests that show something on a GPU only: what they are, and what became of them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from _gpu_ended import read_ended
from _gpu_needs import is_installed
from _gpu_run import ROOT, run

_KERNELS = ROOT / "tests" / "model_ops" / "kernels"
_SECONDS_OF_A_TEST = 200
_KEPT = 4000
# pytest's status where a file has no tests, or none that are left.
_NO_TESTS = 5
# The status of a file of which no test ended in as long as a part may take.
TOO_LONG = 124

Found = dict[str, Any]


def marked_files() -> list[Path]:
    """Files with tests marked `gpu`: graphs, speculation through them, and aiter."""
    return sorted({*_files(ROOT / "tests", r"mark\.gpu\b"), *aiter_files()})


def aiter_files() -> list[Path]:
    """Files whose tests run over aiter itself: the fixture `aiter` has the mark for them."""
    return _files(_KERNELS, r"\baiter: Aiter\b|aiters\(")


def kernel_files() -> list[Path]:
    """Files with tests that run kernels on the device, where there is one, and else interpreted."""
    return _files(_KERNELS, r"\bdevice: torch\.device\b")


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.rglob("test_*.py"))
    return [path for path in found if re.search(pattern, path.read_text(encoding="utf-8"))]


def run_tests(
    files: Sequence[Path],
    seconds: float,
    folder: Path,
    marked: bool,
    processes: int = 1,
    options: Sequence[str] = (),
    seconds_of_a_test: int = _SECONDS_OF_A_TEST,
    earlier: Mapping[str, Any] | None = None,
    most: float = math.inf,
    keep: Callable[[Found], None] = lambda _: None,
) -> Found:
    """What became of the tests in `files`, and whether all passed that were not skipped.

    Args:
        folder: for what pytest writes, of this part alone; what is there belongs to `earlier`.
        marked: only those marked `gpu`.
        processes: files that run side by side, each in a process of its own.
        options: further ones of pytest's.
        seconds_of_a_test: at most, where pytest-timeout is installed; 0 for any.
        earlier: what this returned, or gave to `keep`, before it was cut off: tests that ended are
            not run again.
        most: a file of which no test ends in so many seconds fails: no later run has more time.
        keep: is given what is known so far, at the beginning and whenever a file ends.
    """
    started = time.perf_counter()
    flags = ["-q", "--tb=short", *(["-m", "gpu"] if marked else []), *options]
    if is_installed("pytest_timeout"):
        flags.append(f"--timeout={seconds_of_a_test}")
    chosen = [path for path in files if _can_import(path)]
    lacking = [f"{path.name} (needs hypothesis)" for path in files if path not in chosen]
    known: dict[str, Found] = {part["file"]: part for part in (earlier or {}).get("files", ())}
    ended = {path.name: folder / f"{path.stem}.ended" for path in chosen}
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in ended.items():
        _begin(path, known.get(name), goes_on=earlier is not None)
    lock = Lock()

    def so_far() -> Found:
        ordered = [known.get(path.name) or _unfinished(path, ended[path.name]) for path in chosen]
        return {**_sum_up(ordered, lacking), "seconds": time.perf_counter() - started}

    def run_one(path: Path) -> None:
        left = seconds - (time.perf_counter() - started)
        if left < 1:
            return
        found = _run_file(path, flags, left, ended[path.name], left >= most)
        with lock:
            known[path.name] = found
            keep(so_far())

    waiting = [path for path in chosen if known.get(path.name, {}).get("status") is None]
    # Those that were stopped come first, then those that are likely to take longest.
    waiting.sort(key=lambda path: (not ended[path.name].exists(), -_size(path)))
    wide = max(1, min(processes, len(waiting), (os.cpu_count() or 1) // 2))
    keep(so_far())
    with ThreadPoolExecutor(wide) as pool:
        list(pool.map(run_one, waiting))
    return so_far()


def _begin(path: Path, known: Found | None, *, goes_on: bool) -> None:
    """Let `path` have the tests of a file that ended before this run.

    Args:
        known: of the file, from a report whose folder may be gone.
        goes_on: whether this run goes on with another.
    """
    if not goes_on:
        path.unlink(missing_ok=True)
    elif known is not None and not path.exists():
        lines = [json.dumps(test) + "\n" for test in known["tests"]]
        path.write_text("".join(lines), encoding="utf-8")


def _unfinished(path: Path, ended: Path) -> Found:
    about = {"file": path.name, "begun": ended.exists(), "status": None}
    return {**about, "output": "", "tests": read_ended(ended)}


def _run_file(
    path: Path, flags: Sequence[str], seconds: float, ended: Path, had_most: bool
) -> Found:
    """Run the tests of a file that have not ended."""
    before = read_ended(ended)
    failed = [test for test in before if test["outcome"] in ("failure", "error")]
    ended.touch()
    command = [sys.executable, str(ROOT / "benchmarks" / "_gpu_ended.py"), str(ended)]
    status, printed = run([*command, *flags, str(path)], seconds, keeps=40_000)
    tests = read_ended(ended)
    if status is None and had_most and len(tests) == len(before):
        status = TOO_LONG
        printed += f"\nno test ended in {seconds:.0f} s, and no run has more time\n"
    if status == _NO_TESTS and before:
        status = 0
    if status == 0 and failed:
        status = 1
    earlier = "".join(f"failed in an earlier run: {t['name']}: {t['message']}\n" for t in failed)
    about = {"file": path.name, "begun": True, "status": status}
    return {**about, "output": earlier + printed, "tests": tests}


def _sum_up(parts: Sequence[Found], lacking: Sequence[str]) -> Found:
    """The result of a part from those of its files.

    `files` has those that were begun, `unfinished` the names of those that did not end.

    Args:
        lacking: what could not run.
    """
    tests = [test for part in parts for test in part["tests"]]
    failed = [part for part in parts if part["status"] != 0]
    shown = {part["file"]: part["output"][-_KEPT:] for part in failed}
    unfinished = [part["file"] for part in parts if part["status"] is None]
    stopped = [part["file"] for part in parts if part["status"] == TOO_LONG]
    return {
        "passed": not failed and any(test["outcome"] == "passed" for test in tests),
        "status": _status([part["status"] for part in failed]),
        "tests": tests,
        "left_out": [*unfinished, *stopped, *lacking],
        "output": "\n".join(filter(None, shown.values()))[-2 * _KEPT :],
        "log": "\n".join(part["output"] for part in parts),
        "files": [
            {**part, "output": shown.get(part["file"], "")} for part in parts if part["begun"]
        ],
        "unfinished": unfinished,
    }


def _status(failed: Sequence[int | None]) -> int | None:
    """A failure if there is one, else None for lack of time, else 0."""
    return next((status for status in failed if status is not None), None) if failed else 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _can_import(path: Path) -> bool:
    uses = path.exists() and "import hypothesis" in path.read_text(encoding="utf-8").replace(
        "from hypothesis ", "import hypothesis "
    )
    return not uses or is_installed("hypothesis")
