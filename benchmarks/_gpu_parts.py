"""The parts of gpu_check.py: what each runs, for how long, and what it returns."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gpu_run import ROOT, run
from _gpu_tests import aiter_files, kernel_files, marked_files, run_tests

_FILES_AT_ONCE = 8
_SECONDS_TO_REPORT = 15
# Of the time that a part may take: a file of tests that had so much of it had all.
_NEARLY_ALL = 0.95
# As aiter's log says it.
_BUILT = re.compile(r"finish build \[(\w+)\], cost ([\d.]+) ?s")

Found = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What a part is given.

    Attributes:
        name: of the part.
        seconds: that it may take.
        folder: for what its programs write.
        shapes: of whole decode steps, without Kimi's.
        has_aiter: whether the device is one that aiter runs on, with a torch for it.
        earlier: what the part returned or kept when it was cut off; None to begin.
        keep: is given what the part knows so far, for a later turn should this one be cut off.
    """

    name: str
    seconds: float
    folder: Path
    shapes: tuple[str, ...]
    has_aiter: bool
    earlier: Found | None = None
    keep: Callable[[Found], None] = lambda _: None


@dataclass(frozen=True)
class Part:
    """Attributes:
    title: in the report.
    least: seconds; with less left it is not begun.
    most: seconds that it may take.
    memory: GiB of the device that it needs.
    devices: how many it needs.
    """

    title: str
    least: float
    most: float
    run: Callable[[Turn], Found]
    memory: float = 0.0
    devices: int = 1


def _warm(turn: Turn) -> Found:
    """aiter's modules, which it builds when a function of theirs is first called, and Triton's
    kernels in the sizes of `kernels`.
    """
    started = time.perf_counter()
    found: Found = {"passed": True, "status": 0, "output": "", "modules": []}
    if turn.has_aiter:
        where = aiter_files(), turn.seconds * 0.8, turn.folder / turn.name
        earlier = turn.earlier or {}
        most = _NEARLY_ALL * 0.8 * PARTS["warm"].most
        tests = run_tests(
            *where, True, options=["-s"], seconds_of_a_test=0, earlier=earlier, most=most
        )
        # Whether the tests pass is what `graphs` says.
        found |= {key: tests[key] for key in ("output", "left_out", "files", "unfinished")}
        found["status"] = None if tests["unfinished"] else 0
        found["passed"] = found["status"] == 0
        built = {row["module"]: row for row in built_modules(tests["log"])}
        built |= {row["module"]: row for row in earlier.get("modules", ())}
        found["modules"] = sorted(built.values(), key=lambda row: -float(str(row["seconds"])))
    left = turn.seconds - (time.perf_counter() - started)
    sizes = ["--batch-sizes", "64", "1", "--contexts", "8192", "1024"]
    compiled = run_benchmark("kernels", turn, left, "--warm", *sizes)
    if found["passed"]:
        found |= {key: compiled[key] for key in ("passed", "status", "output")}
    return found | {"report": compiled["report"]}


def built_modules(log: str) -> list[dict[str, Any]]:
    """What aiter says that it built."""
    return [{"module": name, "seconds": float(s)} for name, s in _BUILT.findall(log)]


def _graphs(turn: Turn) -> Found:
    return _tests_of(turn, marked_files(), marked=True, processes=2)


def _kernel_tests(turn: Turn) -> Found:
    return _tests_of(turn, kernel_files(), marked=False, processes=_FILES_AT_ONCE)


def _tests_of(turn: Turn, files: Sequence[Path], marked: bool, processes: int) -> Found:
    """They go on with the tests that an earlier turn did not come to the end of."""
    return run_tests(
        files,
        turn.seconds,
        turn.folder / turn.name,
        marked,
        processes,
        earlier=turn.earlier,
        most=_NEARLY_ALL * PARTS[turn.name].most,
        keep=turn.keep,
    )


def _kernels(turn: Turn) -> Found:
    return _kernels_of(turn, "paged_attention", "mla_decode", "moe_experts", "linear")


def _other_kernels(turn: Turn) -> Found:
    return _kernels_of(turn, "quant_linear", "quant_experts", "mla_prefill", "choose_tokens")


def _kernels_of(turn: Turn, *ops: str) -> Found:
    return run_benchmark("kernels", turn, turn.seconds, "--ops", *ops)


def _steps(turn: Turn) -> Found:
    return run_benchmark("decode_roofline", turn, turn.seconds, "--shapes", *turn.shapes)


def _kimi(turn: Turn) -> Found:
    return run_benchmark("decode_roofline", turn, turn.seconds, "--shapes", "kimi")


def _start(turn: Turn) -> Found:
    return run_benchmark("decode_roofline", turn, turn.seconds, "--start", "kimi")


def _ranks(turn: Turn) -> Found:
    return run_benchmark("several_gpus", turn, turn.seconds)


# In the order in which they run: what later ones need is compiled by then.
PARTS = {
    "warm": Part("First calls, which compile", 40, 520, _warm),
    "graphs": Part("Graphs of target and draft, speculation on equals off", 40, 300, _graphs),
    "kernel-tests": Part("Every implementation against references", 60, 480, _kernel_tests),
    "kernels": Part("Kernels against a copy", 40, 240, _kernels),
    "other-kernels": Part("Quantised weights, prefill, filters", 60, 360, _other_kernels),
    "steps": Part("Decode steps against a copy", 90, 420, _steps),
    "kimi": Part("Decode steps of a Kimi shape", 60, 240, _kimi, memory=40),
    "start": Part("Start with graphs of a Kimi shape", 40, 180, _start, memory=40),
    "ranks": Part("Sums over ranks, and layers split over them", 60, 300, _ranks, 40, devices=2),
}


def run_benchmark(program: str, turn: Turn, seconds: float, *flags: str) -> Found:
    """What a program reports; as far as it came, when it had to be stopped."""
    path = turn.folder / f"{turn.name}.json"
    path.unlink(missing_ok=True)
    # It stops beginning new work in time to write its report.
    own = max(seconds - _SECONDS_TO_REPORT, 5)
    command = [sys.executable, str(ROOT / "benchmarks" / f"{program}.py"), *flags]
    command += ["--seconds", f"{own:.0f}", "--output-json", str(path)]
    started = time.perf_counter()
    status, printed = run(command, seconds, shows=True)
    return {
        "passed": status == 0,
        "status": status,
        "seconds": time.perf_counter() - started,
        "output": printed,
        "report": json.loads(path.read_text(encoding="utf-8")) if path.exists() else None,
    }
