"""Compiles every kernel for every arch on a machine without a GPU, and judges what comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aot_case import MARK, Case

HERE = Path(__file__).parent
ARCHES = ("gfx942", "gfx950", "sm90")
SHARED_LIMIT = {"gfx942": 65536, "gfx950": 163840, "sm90": 232448}
# AMD's compiler spills scalar registers to lanes of vector registers, which have so many.
MOST_SCALAR_SPILLS = 64
# By how much each may exceed the baseline where the occupancy does not suffer.
BASELINE_COUNTS = {"registers": 8, "shared_bytes": 0, "scratch_bytes": 0, "scalar_spills": 0}
OCCUPANCY = "occupancy_percent"
UPDATE = "pytest tests/model_ops/kernels/test_aot.py --run-slow --update-aot-baseline"
_TIMEOUT = 900


@dataclass(frozen=True)
class Outcome:
    """What became of one case on one arch: kernels, or a refusal, or an error.

    resident: programs that the op takes a unit to run side by side, where it splits contexts.
    """

    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    resident: list[int] = field(default_factory=list)
    refused: str | None = None
    error: str | None = None


Outcomes = dict[tuple[str, str], Outcome]


def build_folder() -> Path:
    """Where the table and compiled kernels go: ATOM_KERNEL_BUILD, or build/kernels."""
    given = os.environ.get("ATOM_KERNEL_BUILD")
    folder = Path(given) if given else HERE.parents[2] / "build" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Compiler:
    """Compiles cases for one arch in a process of its own; one that dies is started again."""

    def __init__(self, arch: str, module: str) -> None:
        self._command = [sys.executable, str(HERE / "aot_worker.py"), arch, module]
        self._process: subprocess.Popen[str] | None = None

    def compile(self, name: str) -> Outcome:
        """An error if the process dies of the case."""
        if self._process is None:
            self._start()
        process, deadline = self._process, time.monotonic() + _TIMEOUT
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(_TIMEOUT, process.kill)
        killer.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
            for line in process.stdout:
                if line.startswith(MARK):
                    return Outcome(**json.loads(line.removeprefix(MARK)))
        finally:
            killer.cancel()
        status = f"exit status {process.wait()}"
        if time.monotonic() >= deadline:
            status = f"killed after {_TIMEOUT} s"
        self._errors.seek(0)
        errors = self._errors.read()[-3000:]
        self.close()
        return Outcome(error=f"the compiler died ({status}): {errors}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._errors.close()
            self._process = None

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )


class Lane:
    """A compiler for each arch; each case is compiled once, when it is asked about."""

    def __init__(self, module: str = "aot_cases") -> None:
        self._compilers = {arch: Compiler(arch, module) for arch in ARCHES}
        self._outcomes: Outcomes = {}

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        for compiler in self._compilers.values():
            compiler.close()

    def outcome(self, arch: str, name: str, with_arches: Sequence[str] = ()) -> Outcome:
        """Of a case on `arch`; those on other arches are made side by side with it."""
        missing = [at for at in {arch, *with_arches} if (at, name) not in self._outcomes]
        if (arch, name) not in self._outcomes:
            with ThreadPoolExecutor(len(missing)) as pool:
                made = pool.map(lambda at: self._compilers[at].compile(name), missing)
                self._outcomes.update(zip([(at, name) for at in missing], made, strict=True))
        return self._outcomes[arch, name]


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return kept | {
        "TRITON_CACHE_DIR": str(build_folder() / "triton-cache"),
        "TRITON_DEFAULT_FP_FUSION": "1",  # its default is not the same in all versions
        "TRITON_DISABLE_LINE_INFO": "1",  # the counts are the same without
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
    found = _residency_faults(case, outcome)
    for kernel in {*case.matrix, *case.hands_over}:
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
        if counts.get("scalar_spills", 0) > MOST_SCALAR_SPILLS:
            found.append(f"{kernel}: {counts['scalar_spills']} scalar registers spilled")
        if kernel.split("#")[0] in case.matrix and not counts["matrix_instructions"]:
            found.append(f"{kernel}: no matrix instruction; is a dimension below 16?")
        if kernel in case.hands_over and not counts["handovers"]:
            found.append(f"{kernel}: a program may read parts before they are stored")
        if arch == "sm90" and kernel.split("#")[0] in case.warp_groups:
            small = counts["matrix_instructions"] - counts["warp_group_instructions"]
            if small or not counts["warp_group_instructions"]:
                found.append(f"{kernel}: {small} matrix instructions are not of a warp group")
    return found


def _residency_faults(case: Case, outcome: Outcome) -> list[str]:
    """Where an op that splits contexts takes a unit to run other numbers of programs than it does.

    One number stands for kernels of several shapes: none may run fewer, or more than twice as many.
    """
    if case.split is None:
        return ["splits to fill the device, and no kernel is named"] if outcome.resident else []
    if case.split not in outcome.kernels:
        return [f"{case.split} was not launched, only {', '.join(outcome.kernels)}"]
    programs = outcome.kernels[case.split]["programs"]
    if len(outcome.resident) != 1:
        return [f"splits for {outcome.resident} programs of a unit, which has {programs}"]
    [taken] = outcome.resident
    if taken <= programs <= 2 * taken:
        return []
    return [f"{case.split}: a unit runs {programs} programs, splits are made for {taken}"]


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
        f"{kernel}: {counts[count]} {count}, the baseline has {baseline[kernel].get(count)}; if it "
        f"is worth that: {UPDATE} -k '{case.name}'"
        for kernel, counts in outcome.kernels.items()
        for count in (*BASELINE_COUNTS, OCCUPANCY)
        if count in counts and _is_worse(count, counts[count], baseline[kernel].get(count))
    ]


def _is_worse(count: str, number: int, known: int | None) -> bool:
    if known is None:  # the baseline does not know the count
        return True
    return number < known if count == OCCUPANCY else number > known + BASELINE_COUNTS[count]
