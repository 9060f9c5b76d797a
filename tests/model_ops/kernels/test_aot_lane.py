"""The compile lane notices what it is there to notice."""

from __future__ import annotations

import aot
import aot_toy_cases
import pytest

pytestmark = pytest.mark.timeout(600)

FAULTS = {
    "dies": "the compiler died",
    "not launched": "_other_kernel was not launched, only _product_kernel",
    "no matrix": "no matrix instruction",
    "reads": "reads values of a tensor on the host",
    "launches nothing": "launched no kernel",
    "empty grid": "grid (0,) is not within",
    "spills": "registers spilled",
    "not refused": "expected a refusal (never)",
}
CASES = {case.name: case for case in aot_toy_cases.CASES}


@pytest.fixture(scope="module")
def outcomes() -> aot.Outcomes:
    wanted = [("gfx942", name) for name in CASES]
    return aot.compile_all([*wanted, ("sm90", "add")], "aot_toy_cases")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, outcomes: aot.Outcomes) -> None:
    [fault] = aot.faults(CASES[name], "gfx942", outcomes["gfx942", name])
    assert FAULTS[name] in fault


@pytest.mark.parametrize("name", ["add", "product"])
def test_what_is_right_passes(name: str, outcomes: aot.Outcomes) -> None:
    outcome = outcomes["gfx942", name]
    assert aot.faults(CASES[name], "gfx942", outcome) == []
    assert [counts["matrix_instructions"] > 0 for counts in outcome.kernels.values()] == [
        name == "product"
    ]


def test_an_expected_refusal_is_none_of_another_arch(outcomes: aot.Outcomes) -> None:
    outcome = outcomes["sm90", "add"]
    assert outcome.refused is not None
    assert aot.faults(CASES["add"], "sm90", outcome) == []
    assert aot.faults(CASES["not refused"], "sm90", outcome) == ["refused: toys are not for NVIDIA"]


def test_shared_memory_has_a_limit(outcomes: aot.Outcomes) -> None:
    counts = outcomes["gfx942", "add"].kernels["_add_kernel"] | {"shared_bytes": 100_000}
    outcome = aot.Outcome({"_add_kernel": counts})
    assert "gfx942 has 65536" in aot.faults(CASES["add"], "gfx942", outcome)[0]
    assert aot.faults(CASES["add"], "gfx950", outcome) == []


def test_more_than_the_baseline_is_a_regression(outcomes: aot.Outcomes) -> None:
    outcome = outcomes["gfx942", "add"]
    counts = outcome.kernels["_add_kernel"]

    def found(**baseline: int) -> list[str]:
        known = {"_add_kernel": counts | baseline}
        return aot.regressions(CASES["add"], "gfx942", outcome, known)

    assert found() == []
    assert found(registers=counts["registers"] - 8) == []
    assert "registers" in found(registers=counts["registers"] - 9)[0]
    assert "shared_bytes" in found(shared_bytes=-1)[0]
    assert aot.UPDATE in aot.regressions(CASES["add"], "gfx942", outcome, {})[0]
