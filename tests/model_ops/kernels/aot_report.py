"""The compile lane's table, and the baseline that it is compared with."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import triton
from aot import (
    ARCHES,
    BASELINE_COUNTS,
    HERE,
    OCCUPANCY,
    UPDATE,
    Outcome,
    Outcomes,
    build_folder,
    faults,
)
from aot_cases import CASES

BASELINE = HERE / "aot_baseline.json"
_COLUMNS = (
    "registers",
    "scalar_registers",
    "spills",
    "scalar_spills",
    "scratch_bytes",
    "shared_bytes",
    "warps",
    "programs",
    "occupancy_percent",
    "matrix_instructions",
    "warp_group_instructions",
)

Baseline = dict[str, dict[str, dict[str, dict[str, int]]]]  # case, arch, kernel, count


def report(compiled: Iterable[Any], is_update: bool) -> str:
    """Write what tests compiled, in whichever processes, to the table; a line about it.

    Args:
        compiled: arch, case and the fields of the outcome, as the tests' reports have them.
        is_update: also to the baseline, what has no faults.
    """
    outcomes = {(arch, name): Outcome(**fields) for arch, name, fields in compiled}
    if is_update:
        cases = {case.name: case for case in CASES}
        good = {
            at: outcomes[at] for at in outcomes if not faults(cases[at[1]], at[0], outcomes[at])
        }
        update_baseline(good, cases)
    return summary(outcomes, write_table(outcomes))


def read_baseline() -> tuple[str, Baseline]:
    """The version of triton that it was made with, and what it knows."""
    if not BASELINE.exists():
        return triton.__version__, {}
    document = json.loads(BASELINE.read_text())
    return document["triton"], document["cases"]


def comparable(made_with: str) -> bool:
    """Whether this triton, of the same series and built by the same people, compiles alike."""
    here = triton.__version__
    return "+" not in here and here.split(".")[:2] == made_with.split(".")[:2]


def update_baseline(outcomes: Outcomes, every_case: Collection[str]) -> None:
    """Take over what was compiled; forget cases that no longer exist."""
    made_with, known = read_baseline()
    every = {(arch, name) for name in every_case for arch in ARCHES}
    if not comparable(made_with) and set(outcomes) != every:
        raise RuntimeError(
            f"the baseline was made with triton {made_with}, this is {triton.__version__}: "
            f"update all cases, not some: {UPDATE}"
        )
    cases = {name: arches for name, arches in known.items() if name in every_case}
    for (arch, name), outcome in outcomes.items():
        kept = {
            kernel: {name: counts[name] for name in (*BASELINE_COUNTS, OCCUPANCY) if name in counts}
            for kernel, counts in outcome.kernels.items()
        }
        cases.setdefault(name, {})[arch] = kept
    text = json.dumps({"triton": triton.__version__, "cases": cases}, indent=1, sort_keys=True)
    # A kernel's counts on one line.
    text = re.sub(r"\{[^{}]+\}", lambda found: " ".join(found[0].split()), text)
    BASELINE.write_text(text + "\n")


def write_table(outcomes: Outcomes) -> Path:
    """table.json and table.md in the build folder; the latter's path."""
    rows = [
        {"case": name, "arch": arch, "kernel": kernel, **counts}
        for (arch, name), outcome in sorted(outcomes.items(), key=lambda item: item[0][::-1])
        for kernel, counts in outcome.kernels.items()
    ]
    folder = build_folder()
    document = {"triton": triton.__version__, "kernels": rows}
    (folder / "table.json").write_text(json.dumps(document, indent=1) + "\n")
    head = ("case", "arch", "kernel", *_COLUMNS)
    lines = [
        f"# Compiled kernels, triton {triton.__version__}",
        "",
        "| " + " | ".join(column.replace("_", " ") for column in head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
        *("| " + " | ".join(str(row.get(column, "")) for column in head) + " |" for row in rows),
    ]
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    return folder / "table.md"


def summary(outcomes: Outcomes, table: Path) -> str:
    """How much was compiled, of how much, in a line."""
    parts = []
    for arch in sorted({arch for arch, _ in outcomes}):
        mine = [outcome for (at, _), outcome in outcomes.items() if at == arch]
        kernels = sum(len(outcome.kernels) for outcome in mine)
        refused = sum(outcome.refused is not None for outcome in mine)
        parts.append(
            f"{arch}: {kernels} kernels of {len(mine)} of {len(CASES)} cases, {refused} refused"
        )
    made_with, _ = read_baseline()
    compared = "" if comparable(made_with) else f", NOT compared with that of {made_with}"
    rest = "" if len(outcomes) == len(CASES) * len(ARCHES) else "; the rest with --run-slow"
    return (
        f"compiled with triton {triton.__version__}{compared}: {'; '.join(parts)}{rest}; "
        f"see {table}"
    )
