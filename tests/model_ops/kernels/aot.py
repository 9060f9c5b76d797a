"""Compiles every kernel for every arch on a machine without a GPU, and judges what comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aot_case import MARK, Case

HERE = Path(__file__).parent
ARCHES = ("gfx942", "gfx950", "sm90")
SHARED_LIMIT = {"gfx942": 65536, "gfx950": 163840, "sm90": 232448}
# By how much each may exceed the baseline: registers are allocated in steps of 8.
BASELINE_COUNTS = {"registers": 8, "shared_bytes": 0, "scratch_bytes": 0}
UPDATE = "pytest tests/model_ops/kernels/test_aot.py --update-aot-baseline"
_TIMEOUT = 900
_PROCESSES = 2


@dataclass(frozen=True)
class Outcome:
    """What became of one case on one arch: kernels, or a refusal, or an error."""

    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: str | None = None
    error: str | None = None


Outcomes = dict[tuple[str, str], Outcome]


def build_folder() -> Path:
    """Where the table and compiled kernels go: ATOM_KERNEL_BUILD, or build/kernels."""
    given = os.environ.get("ATOM_KERNEL_BUILD")
    folder = Path(given) if given else HERE.parents[2] / "build" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compile_all(wanted: Iterable[tuple[str, str]], module: str = "aot_cases") -> Outcomes:
    """Outcomes of the (arch, case name) pairs, from a few processes side by side."""
    by_arch: dict[str, list[str]] = {}
    for arch, name in wanted:
        by_arch.setdefault(arch, []).append(name)
    tasks = [(arch, part) for arch, names in by_arch.items() for part in _halves(names)]
    outcomes: Outcomes = {}
    with ThreadPoolExecutor(_PROCESSES) as pool:
        for done in pool.map(lambda task: _compile(*task, module), tasks):
            outcomes.update(done)
    return outcomes


def _halves(names: list[str]) -> list[list[str]]:
    return [names] if len(names) < 8 else [names[::2], names[1::2]]


def _compile(arch: str, names: Sequence[str], module: str) -> Outcomes:
    outcomes: Outcomes = {}
    while left := [name for name in names if (arch, name) not in outcomes]:
        outcomes.update(_run_worker(arch, left, module))
    return outcomes


def _run_worker(arch: str, names: Sequence[str], module: str) -> Outcomes:
    """Outcomes of at least one case; the case that the process dies of gets an error."""
    command = [sys.executable, str(HERE / "aot_worker.py"), arch, module, *names]
    try:
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=_TIMEOUT
        )
        output, errors, status = done.stdout, done.stderr, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        output, errors = _text(expired.stdout), _text(expired.stderr)
        status = f"killed after {_TIMEOUT} s"
    begun, outcomes = None, {}
    for line in output.splitlines():
        if line.startswith(MARK):
            event: dict[str, Any] = json.loads(line.removeprefix(MARK))
            begun = event.pop("case")
            if event:
                outcomes[arch, begun] = Outcome(**event)
    if begun is None:
        raise RuntimeError(f"the compiling process for {arch} did not start: {errors[-3000:]}")
    if (arch, begun) not in outcomes:
        outcomes[arch, begun] = Outcome(error=f"the compiler died ({status}): {errors[-3000:]}")
    return outcomes


def _text(output: bytes | str | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return kept | {
        "TRITON_CACHE_DIR": str(build_folder() / "triton-cache"),
        "TRITON_DEFAULT_FP_FUSION": "1",  # its default is not the same in all versions
        "OMP_NUM_THREADS": "1",
    }


def faults(case: Case, arch: str, outcome: Outcome) -> list[str]:
    """What is wrong with a case's outcome, whatever it was before."""
    if outcome.error is not None:
        return [outcome.error]
    if outcome.refused is not None or arch in case.refused:
        return _refusal_faults(case.refused.get(arch), outcome.refused)
    if not outcome.kernels:
        return ["the op launched no kernel"]
    found = []
    for kernel in case.matrix:
        if kernel not in outcome.kernels:
            found.append(f"{kernel} was not launched, only {', '.join(outcome.kernels)}")
    for kernel, counts in outcome.kernels.items():
        if counts["shared_bytes"] > SHARED_LIMIT[arch]:
            found.append(
                f"{kernel}: {counts['shared_bytes']} bytes of shared memory, {arch} has "
                f"{SHARED_LIMIT[arch]}"
            )
        if counts["spills"]:
            found.append(f"{kernel}: {counts['spills']} registers spilled")
        if kernel.split("#")[0] in case.matrix and not counts["matrix_instructions"]:
            found.append(f"{kernel}: no matrix instruction; is a dimension below 16?")
    return found


def _refusal_faults(expected: str | None, given: str | None) -> list[str]:
    if given is None:
        return [f"expected a refusal ({expected}), but it was compiled"]
    if expected is None:
        return [f"refused: {given}"]
    return [] if expected in given else [f"refused because {given!r}, expected {expected!r}"]


def regressions(
    case: Case, arch: str, outcome: Outcome, baseline: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """Where a case's kernels need more than those of the baseline, which must know them all."""
    if set(baseline) != set(outcome.kernels):
        return [
            f"compiled were {sorted(outcome.kernels)}, the baseline of {case.name} on {arch} has "
            f"{sorted(baseline)}; if that is right: {UPDATE} -k '{case.name}'"
        ]
    return [
        f"{kernel}: {counts[count]} {count}, the baseline has {baseline[kernel][count]}; if it is "
        f"worth that: {UPDATE} -k '{case.name}'"
        for kernel, counts in outcome.kernels.items()
        for count, tolerance in BASELINE_COUNTS.items()
        if counts[count] > baseline[kernel][count] + tolerance
    ]
