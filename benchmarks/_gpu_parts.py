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
_REHEARSED = ["--device", "cpu", "--tiny", "--dtype", "float32"]

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
        rehearse: on a CPU, as little as shows that all of it runs.
        earlier: what the part returned or kept when it was cut off; None to begin.
        keep: is given what the part knows so far, for a later turn should this one be cut off.
    """

    name: str
    seconds: float
    folder: Path
    shapes: tuple[str, ...]
    has_aiter: bool
    rehearse: bool
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
    if turn.rehearse:
        sizes = ["--ops", "paged_attention", "--kv-cache-dtypes", "auto"]
    compiled = run_benchmark("kernels", turn, left, "--warm", *sizes)
    if found["passed"]:
        found |= {key: compiled[key] for key in ("passed", "status", "output")}
    return found | {"report": compiled["report"]}


def built_modules(log: str) -> list[dict[str, Any]]:
    """What aiter says that it built."""
    return [{"module": name, "seconds": float(s)} for name, s in _BUILT.findall(log)]


def _graphs(turn: Turn) -> Found:
    files = marked_files()
    if turn.rehearse:  # all of them are skipped on a CPU
        files = [path for path in files if path.name == "test_graphs_on_gpu.py"]
    found = _tests_of(turn, files, marked=True, processes=2)
    return found | ({"passed": found["status"] == 0} if turn.rehearse else {})


def _kernel_tests(turn: Turn) -> Found:
    files, options = kernel_files(), list[str]()
    if turn.rehearse:
        files = [path for path in files if path.name == "test_every_implementation.py"]
        options = ["-k", "rms_norm"]
    return _tests_of(turn, files, marked=False, processes=_FILES_AT_ONCE, options=options)


def _tests_of(
    turn: Turn, files: Sequence[Path], marked: bool, processes: int, options: Sequence[str] = ()
) -> Found:
    """They go on with the tests that an earlier turn did not come to the end of."""
    return run_tests(
        files,
        turn.seconds,
        turn.folder / turn.name,
        marked,
        processes,
        options,
        earlier=turn.earlier,
        most=_NEARLY_ALL * PARTS[turn.name].most,
        keep=turn.keep,
    )


def _kernels(turn: Turn) -> Found:
    return _kernels_of(turn, "paged_attention", "mla_decode", "moe_experts", "linear")


def _other_kernels(turn: Turn) -> Found:
    return _kernels_of(turn, "quant_linear", "quant_experts", "mla_prefill", "choose_tokens")


def _kernels_of(turn: Turn, *ops: str) -> Found:
    quick = ["--kv-cache-dtypes", "auto", "--implementations", "torch", "native"]
    flags = ["--ops", *ops, *(quick if turn.rehearse else [])]
    return run_benchmark("kernels", turn, turn.seconds, *flags)


def _steps(turn: Turn) -> Found:
    quick = ["--batch-sizes", "1", "--no-peer", "--num-threads", "1"] if turn.rehearse else []
    flags = ["--shapes", *turn.shapes, *quick]
    return run_benchmark("decode_roofline", turn, turn.seconds, *flags)


def _kimi(turn: Turn) -> Found:
    quick = ["--batch-sizes", "1", "--num-threads", "1"] if turn.rehearse else []
    flags = ["--shapes", _kimi_shape(turn), *quick]
    return run_benchmark("decode_roofline", turn, turn.seconds, *flags)


def _start(turn: Turn) -> Found:
    return run_benchmark("decode_roofline", turn, turn.seconds, "--start", _kimi_shape(turn))


def _ranks(turn: Turn) -> Found:
    return run_benchmark("several_gpus", turn, turn.seconds)


def _kimi_shape(turn: Turn) -> str:
    return "tiny-kimi" if turn.rehearse else "kimi"


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
    command += [*(_REHEARSED if turn.rehearse else []), "--seconds", f"{own:.0f}"]
    started = time.perf_counter()
    status, printed = run([*command, "--output-json", str(path)], seconds, shows=True)
    return {
        "passed": status == 0,
        "status": status,
        "seconds": time.perf_counter() - started,
        "output": printed,
        "report": json.loads(path.read_text(encoding="utf-8")) if path.exists() else None,
    }
