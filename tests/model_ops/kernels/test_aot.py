"""Every kernel compiles for every arch, within its limits, and no worse than it did."""

from __future__ import annotations

import aot
import aot_report
import pytest
from aot_case import Case
from aot_cases import CASES

# The first test waits for all compilations.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> aot.Outcomes:
    """Everything that the chosen tests ask about, compiled in a few processes."""
    wanted = [
        (item.callspec.params["arch"], item.callspec.params["case"].name)
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_compiles.__name__
    ]
    found = aot.compile_all(wanted)
    table = aot_report.write_table(found)
    if pytestconfig.getoption("--update-aot-baseline"):
        cases = {case.name: case for case in CASES}
        good = {at: found[at] for at in found if not aot.faults(cases[at[1]], at[0], found[at])}
        aot_report.update_baseline(good, cases)
    pytestconfig.stash[aot_report.SUMMARY] = aot_report.summary(found, table)
    return found


@pytest.mark.parametrize("arch", aot.ARCHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles(case: Case, arch: str, outcomes: aot.Outcomes) -> None:
    outcome = outcomes[arch, case.name]
    assert not aot.faults(case, arch, outcome)
    made_with, baseline = aot_report.read_baseline()
    if aot_report.comparable(made_with):  # the summary says when it is another
        known = baseline.get(case.name, {}).get(arch, {})
        assert not aot.regressions(case, arch, outcome, known)


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_the_baseline_has_only_these_cases() -> None:
    _, baseline = aot_report.read_baseline()
    assert set(baseline) <= {case.name for case in CASES}, f"to forget the others: {aot.UPDATE}"
