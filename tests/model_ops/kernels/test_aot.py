"""Every kernel compiles for every arch, within its limits, and no worse than it did.

At each commit the cases in `AT_EACH_COMMIT`; all of them with `--run-slow`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict

import aot
import aot_report
import pytest
from aot_case import Case
from aot_cases import AT_EACH_COMMIT, CASES

# More than a compiler may take for a case.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def lane() -> Iterator[aot.Lane]:
    with aot.Lane() as lane:
        yield lane


@pytest.fixture(scope="module")
def with_arches(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Arches that chosen tests ask about, by case; none where other workers may ask as well."""
    found: dict[str, list[str]] = {}
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for item in request.session.items:
            if (
                isinstance(item, pytest.Function)
                and item.originalname == test_compiles.__name__
                and not item.get_closest_marker("skip")
            ):
                params = item.callspec.params
                found.setdefault(params["case"].name, []).append(params["arch"])
    return found


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        pytest.param(
            case,
            arch,
            id=f"{case.name}-{arch}",
            marks=() if (arch, case.name) in AT_EACH_COMMIT else pytest.mark.slow,
        )
        for arch in aot.ARCHES  # one after another: processes of tests start few compilers then
        for case in CASES
    ],
)
def test_compiles(
    case: Case,
    arch: str,
    lane: aot.Lane,
    with_arches: dict[str, list[str]],
    record_property: Callable[[str, object], None],
) -> None:
    outcome = lane.outcome(arch, case.name, with_arches.get(case.name, ()))
    record_property("compiled", (arch, case.name, asdict(outcome)))
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


def test_each_kernel_is_compiled_for_each_arch_at_each_commit() -> None:
    _, baseline = aot_report.read_baseline()
    for arch in aot.ARCHES:
        every, at_each_commit = (
            {
                (case.op, case.implementation, kernel.split("#")[0])
                for case in cases
                for kernel in baseline.get(case.name, {}).get(arch, {})
            }
            for cases in (CASES, [case for case in CASES if (arch, case.name) in AT_EACH_COMMIT])
        )
        assert at_each_commit == every
        assert len(every) > 20
