"""Tests that show something on a GPU only: what they are, and what became of them."""

from __future__ import annotations

import os
import re
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _gpu_needs import is_installed
from _gpu_run import ROOT, run

_KERNELS = ROOT / "tests" / "model_ops" / "kernels"
_SECONDS_OF_A_TEST = 200


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
) -> dict[str, Any]:
    """What became of the tests in `files`, and whether all passed that were not skipped.

    Args:
        folder: for what pytest writes.
        marked: only those marked `gpu`.
        processes: files that run side by side, each in a process of its own.
        options: further ones of pytest's.
        seconds_of_a_test: at most, where pytest-timeout is installed; 0 for any.
    """
    started = time.perf_counter()
    flags = ["-q", "--tb=short", *(["-m", "gpu"] if marked else []), *options]
    if is_installed("pytest_timeout"):
        flags.append(f"--timeout={seconds_of_a_test}")
    lacking = [path for path in files if not _can_import(path)]

    def run_file(path: Path) -> dict[str, Any]:
        xml = folder / f"{path.stem}.xml"
        xml.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *flags, f"--junitxml={xml}", str(path)]
        left = seconds - (time.perf_counter() - started)
        if left < 1:
            return {"file": path.name, "status": None, "output": "not begun", "tests": []}
        status, printed = run(command, left, keeps=40_000)
        cases = ET.parse(xml).iter("testcase") if xml.exists() else ()
        tests = [_outcome(case) for case in cases]
        return {"file": path.name, "status": status, "output": printed, "tests": tests}

    chosen = [path for path in files if path not in lacking]
    most = max(1, min(processes, len(chosen), (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(most) as pool:
        found = list(pool.map(run_file, chosen))
    tests = [test for part in found for test in part["tests"]]
    failed = [part for part in found if part["status"] != 0]
    stopped = [part["file"] for part in found if part["status"] is None]
    shown = "\n".join(part["output"][-4000:] for part in failed)
    return {
        "passed": not failed and any(test["outcome"] == "passed" for test in tests),
        "status": _status([part["status"] for part in failed]),
        "seconds": time.perf_counter() - started,
        "tests": tests,
        "left_out": [*stopped, *(f"{path.name} (needs hypothesis)" for path in lacking)],
        "output": shown[-8000:],
        "log": "\n".join(part["output"] for part in found),
    }


def _status(failed: Sequence[int | None]) -> int | None:
    """A failure if there is one, else None for lack of time, else 0."""
    return next((status for status in failed if status is not None), None) if failed else 0


def _can_import(path: Path) -> bool:
    uses = path.exists() and "import hypothesis" in path.read_text(encoding="utf-8").replace(
        "from hypothesis ", "import hypothesis "
    )
    return not uses or is_installed("hypothesis")


def _outcome(case: ET.Element) -> dict[str, Any]:
    outcome, message = "passed", ""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            outcome, message = kind, found.get("message", "")
    name = f"{case.get('classname')}.{case.get('name')}"
    seconds = float(case.get("time", 0))
    return {"name": name, "outcome": outcome, "seconds": seconds, "message": message}
