"""Every kernel in the shapes in which the engine launches it.

A long family of cases has a file of its own, `aot_cases_<what>.py`, and is joined in here. Run
some of them with `pytest tests/model_ops/kernels/test_aot.py -k "<part of the name>"`.

The first case of a family (`family`) stands for it: it is compiled for every arch at each commit,
the others with `--run-slow`.
"""

from __future__ import annotations

import aot_cases_attention
import aot_cases_elementwise
import aot_cases_gluon
import aot_cases_invariant
import aot_cases_mla
import aot_cases_moe
import aot_cases_quant
import aot_cases_quant_experts
import aot_cases_recurrent
import aot_cases_rope_cache
import aot_cases_steps
from aot_case import PLATFORMS, Case

CASES: tuple[Case, ...] = (
    *aot_cases_attention.CASES,
    *aot_cases_elementwise.CASES,
    *aot_cases_gluon.CASES,
    *aot_cases_invariant.CASES,
    *aot_cases_mla.CASES,
    *aot_cases_moe.CASES,
    *aot_cases_quant.CASES,
    *aot_cases_quant_experts.CASES,
    *aot_cases_recurrent.CASES,
    *aot_cases_rope_cache.CASES,
    *aot_cases_steps.CASES,
)


def family(case: Case) -> tuple[object, ...]:
    """Cases of one family use the same kernels, with caches and weights of the same formats."""
    kernels = case.op, case.implementation, case.batch_invariant
    return *kernels, case.storage == "fp8", case.weights


def _at_each_commit() -> frozenset[tuple[str, str]]:
    first = {family(case): case.name for case in reversed(CASES)}
    return frozenset(
        (arch, case.name)
        for case in CASES
        for arch in PLATFORMS
        if first[family(case)] == case.name
    )


AT_EACH_COMMIT = _at_each_commit()
"""Arch and case of what is compiled without `--run-slow`."""
