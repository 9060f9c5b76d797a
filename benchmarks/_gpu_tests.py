"""Tests that show something on a GPU only: what they are, and what became of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_KERNELS = ROOT / "tests" / "model_ops" / "kernels"


def marked_files() -> list[Path]:
    """Files with tests marked `gpu`: graphs, speculation through them, and aiter."""
    # The fixture `aiter` has the mark for its tests.
    return _files(ROOT / "tests", r"mark\.gpu\b|\baiter: Aiter\b")


def kernel_files() -> list[Path]:
    """Files with tests that run kernels on the device, where there is one, and else interpreted."""
    return _files(_KERNELS, r"\bdevice: torch\.device\b")


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.rglob("test_*.py"))
    return [path for path in found if re.search(pattern, path.read_text(encoding="utf-8"))]


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit status, None when it took too long, and the end of what was printed."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            timeout=max(seconds, 1),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return None, text[-4000:]
    return done.returncode, done.stdout[-4000:]


def run_tests(
    files: Sequence[Path], seconds: float, folder: Path, marked: bool, processes: int = 1
) -> dict[str, Any]:
    """What became of the tests in `files`, and whether all passed that were not skipped.

    Args:
        marked: only those marked `gpu`.
        processes: files that run side by side, each in a process of its own.
    """
    started = time.perf_counter()
    flags = ["-q", "--tb=short", "--timeout=200", *(["-m", "gpu"] if marked else [])]

    def run_file(path: Path) -> dict[str, Any]:
        xml = folder / f"{path.stem}.xml"
        command = [sys.executable, "-m", "pytest", *flags, f"--junitxml={xml}", str(path)]
        left = seconds - (time.perf_counter() - started)
        if left < 1:
            return {"file": path.name, "status": None, "output": "not begun", "tests": []}
        status, printed = run(command, left)
        cases = ET.parse(xml).iter("testcase") if xml.exists() else ()
        tests = [_outcome(case) for case in cases]
        return {"file": path.name, "status": status, "output": printed, "tests": tests}

    most = max(1, min(processes, len(files), (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(most) as pool:
        found = list(pool.map(run_file, files))
    tests = [test for part in found for test in part["tests"]]
    failed = [part for part in found if part["status"] != 0]
    return {
        "passed": not failed and any(test["outcome"] == "passed" for test in tests),
        "status": 0 if not failed else failed[0]["status"],
        "seconds": time.perf_counter() - started,
        "tests": tests,
        "left_out": [part["file"] for part in found if part["status"] is None],
        "output": "\n".join(part["output"] for part in failed)[-8000:],
    }


def _outcome(case: ET.Element) -> dict[str, Any]:
    outcome, message = "passed", ""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            outcome, message = kind, found.get("message", "")
    name = f"{case.get('classname')}.{case.get('name')}"
    seconds = float(case.get("time", 0))
    return {"name": name, "outcome": outcome, "seconds": seconds, "message": message}
