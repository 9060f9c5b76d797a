"""The compile lane notices what it is there to notice."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import aot
import aot_report
import aot_residency
import aot_toy_cases
import pytest
import torch
from aot_case import PLATFORMS
from aot_cases import CASES as KERNEL_CASES

pytestmark = pytest.mark.timeout(600)

FAULTS = {
    "dies": "the compiler died",
    "not launched": "_other_kernel was not launched, only _product_kernel",
    "no matrix": "no matrix instruction",
    "reads": "reads values of a tensor on the host",
    "launches nothing": "launched no kernel",
    "empty grid": "grid (0,) is not within",
    "spills": " registers spilled",
    "scalar spills": " scalar registers spilled",
    "not refused": "expected a refusal (never)",
}
CASES = {case.name: case for case in aot_toy_cases.CASES}


@pytest.fixture(scope="module")
def lane() -> Iterator[aot.Lane]:
    with aot.Lane("aot_toy_cases") as lane:
        yield lane


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, lane: aot.Lane) -> None:
    [fault] = aot.faults(CASES[name], "gfx942", lane.outcome("gfx942", name))
    assert FAULTS[name] in fault


@pytest.mark.parametrize("arch", aot.ARCHES)
def test_spills_are_seen_on_every_arch(arch: str, lane: aot.Lane) -> None:
    [fault] = aot.faults(CASES["spills"], arch, lane.outcome(arch, "spills"))
    assert re.fullmatch(r"_normalise_kernel: \d+ registers spilled", fault)


@pytest.mark.parametrize("name", ["add", "product"])
def test_what_is_right_passes(name: str, lane: aot.Lane) -> None:
    outcome = lane.outcome("gfx942", name)
    assert aot.faults(CASES[name], "gfx942", outcome) == []
    assert [counts["matrix_instructions"] > 0 for counts in outcome.kernels.values()] == [
        name == "product"
    ]


def test_an_expected_refusal_is_none_of_another_arch(lane: aot.Lane) -> None:
    outcome = lane.outcome("sm90", "add")
    assert outcome.refused is not None
    assert aot.faults(CASES["add"], "sm90", outcome) == []
    assert aot.faults(CASES["not refused"], "sm90", outcome) == ["refused: toys are not for NVIDIA"]


def test_shared_memory_has_a_limit(lane: aot.Lane) -> None:
    counts = lane.outcome("gfx942", "add").kernels["_add_kernel"] | {"shared_bytes": 100_000}
    outcome = aot.Outcome({"_add_kernel": counts})
    assert "gfx942 has 65536" in aot.faults(CASES["add"], "gfx942", outcome)[0]
    assert aot.faults(CASES["add"], "gfx950", outcome) == []


def test_more_than_the_baseline_is_a_regression(lane: aot.Lane) -> None:
    outcome = lane.outcome("gfx942", "add")
    counts = outcome.kernels["_add_kernel"]

    def found(**baseline: int) -> list[str]:
        known = {"_add_kernel": counts | baseline}
        return aot.regressions(CASES["add"], "gfx942", outcome, known)

    assert found() == []
    assert found(registers=counts["registers"] - 8) == []
    assert "registers" in found(registers=counts["registers"] - 9)[0]
    assert "shared_bytes" in found(shared_bytes=-1)[0]
    assert "scratch_bytes" in found(scratch_bytes=-1)[0]
    # Within the tolerance of registers, but a program fewer fits in.
    occupancy = counts["occupancy_percent"] + 1
    [fault] = found(registers=counts["registers"] - 8, occupancy_percent=occupancy)
    assert "occupancy_percent" in fault
    assert aot.UPDATE in aot.regressions(CASES["add"], "gfx942", outcome, {})[0]
    unknown = {"_add_kernel": {name: counts[name] for name in aot.BASELINE_COUNTS}}
    [fault] = aot.regressions(CASES["add"], "gfx942", outcome, unknown)
    assert "the baseline has None" in fault


@pytest.mark.parametrize(
    ("arch", "registers", "warps", "shared", "programs", "percent"),
    [
        ("gfx942", 287, 4, 36864, 1, 12),
        ("gfx942", 126, 1, 0, 16, 50),
        ("gfx942", 169, 1, 0, 8, 25),
        ("gfx942", 159, 8, 0, 1, 25),  # a third wave on each SIMD is half a program
        ("gfx942", 32, 4, 32768, 2, 25),
        ("gfx942", 8, 1, 0, 32, 100),
        ("gfx950", 88, 4, 32768, 4, 50),  # 33280 bytes are allocated
        ("gfx950", 234, 4, 73728, 2, 25),
        ("sm90", 64, 4, 37888, 6, 37),
        ("sm90", 188, 4, 0, 2, 12),  # ten warps in all, but eight side by side in four parts
        ("sm90", 255, 8, 131072, 1, 12),
        ("sm90", 16, 1, 0, 32, 50),
    ],
)
def test_residency(
    arch: str, registers: int, warps: int, shared: int, programs: int, percent: int
) -> None:
    if arch == "sm90":
        counts = aot_residency.nvidia(registers, warps, shared)
    else:
        counts = aot_residency.amd(arch, registers, warps, shared)
    assert counts == {"programs": programs, "occupancy_percent": percent}


def test_parts_are_handed_over(lane: aot.Lane) -> None:
    case = dataclasses.replace(CASES["add"], hands_over=("_add_kernel",))
    [fault] = aot.faults(case, "gfx942", lane.outcome("gfx942", "add"))
    assert fault == "_add_kernel: a program may read parts before they are stored"


def test_splits_are_made_for_the_programs_that_fit() -> None:
    case = next(case for case in KERNEL_CASES if case.split == "_absorbed_kernel")
    counts = {"shared_bytes": 0, "spills": 0, "matrix_instructions": 8}

    def found(programs: int, *resident: int) -> list[str]:
        kernels = {"_absorbed_kernel": counts | {"programs": programs}}
        return aot.faults(case, "gfx942", aot.Outcome(kernels, list(resident)))

    assert found(1, 1) == found(2, 2) == found(4, 2) == []
    assert found(1, 2) == ["_absorbed_kernel: a unit runs 1 programs, splits are made for 2"]
    assert "runs 5 programs, splits are made for 2" in found(5, 2)[0]
    assert found(1) == ["splits for [] programs of a unit, which has 1"]
    other = dataclasses.replace(case, split=None)
    outcome = aot.Outcome({"_absorbed_kernel": counts}, [1])
    assert "no kernel is named" in aot.faults(other, "gfx942", outcome)[0]


def test_other_instructions_than_those_of_warp_groups_are_a_fault(lane: aot.Lane) -> None:
    case, small = CASES["product of warp groups"], CASES["product of small tiles"]
    assert aot.faults(case, "sm90", lane.outcome("sm90", case.name)) == []
    [fault] = aot.faults(small, "sm90", lane.outcome("sm90", small.name))
    assert "matrix instructions are not of a warp group" in fault


def test_a_case_is_compiled_once(lane: aot.Lane) -> None:
    first = lane.outcome("gfx942", "add", ["sm90"])
    assert lane.outcome("gfx942", "add") is first


def test_a_compiler_that_died_is_started_again(lane: aot.Lane) -> None:
    assert lane.outcome("gfx942", "dies").error is not None
    assert lane.outcome("gfx942", "product").error is None


def test_the_baseline_of_another_triton_is_made_anew_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot_report, "BASELINE", tmp_path / "baseline.json")
    aot_report.BASELINE.write_text('{"triton": "0.1.0", "cases": {"add": {"gfx942": {}}}}')
    made = {(arch, "add"): aot.Outcome() for arch in aot.ARCHES}
    with pytest.raises(RuntimeError, match="update all cases, not some"):
        aot_report.update_baseline({at: made[at] for at in list(made)[:2]}, ["add"])
    aot_report.update_baseline(made, ["add"])
    assert set(aot_report.read_baseline()[1]["add"]) == set(aot.ARCHES)


POOL_OPS = ("cache_write", "paged_attention", "prefill_attention", "mla_decode", "mla_prefill")


@pytest.mark.parametrize("op", POOL_OPS)
def test_pools_are_beyond_2_gib(op: str) -> None:
    """As on a GPU; Triton's AMD backend compiles another kernel for a smaller storage."""
    cases = [case for case in KERNEL_CASES if case.op.endswith(op)]
    for case in cases:
        _, *arguments = case.arguments(case.query(PLATFORMS["gfx942"]))
        fields = [value for argument in arguments for value in vars_of(argument)]
        tensors = [value for value in fields if isinstance(value, torch.Tensor)]
        assert max(tensor.untyped_storage().nbytes() for tensor in tensors) > 2**31
    assert cases


def vars_of(argument: object) -> list[object]:
    return list(vars(argument).values()) if dataclasses.is_dataclass(argument) else []
