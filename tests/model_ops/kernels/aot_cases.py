"""Every kernel in the shapes in which the engine launches it.

A long family of cases has a file of its own, `aot_cases_<what>.py`, and is joined in here. Run
some of them with `pytest tests/model_ops/kernels/test_aot.py -k "<part of the name>"`.

At each commit each kernel is compiled for every arch, and each family of cases (`family`) for one
of them at least, by the first case of the family; the others with `--run-slow`.
"""

from __future__ import annotations

import itertools

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


def kernels(case: Case) -> tuple[object, ...]:
    """Cases that agree in this launch the same kernels."""
    quantises = case.weights is not None and case.weights.activations is not None
    return case.op, case.implementation, case.batch_invariant, quantises


def family(case: Case) -> tuple[object, ...]:
    """Cases of one family have caches and weights of the same formats, too."""
    return *kernels(case), case.storage == "fp8", case.weights


def _at_each_commit() -> frozenset[tuple[str, str]]:
    turns = itertools.cycle(PLATFORMS)
    seen: set[tuple[object, ...]] = set()
    chosen: set[tuple[str, str]] = set()
    for case in CASES:
        if kernels(case) not in seen:
            chosen |= {(arch, case.name) for arch in PLATFORMS}
        elif family(case) not in seen:
            chosen.add((next(arch for arch in turns if arch not in case.refused), case.name))
        seen |= {kernels(case), family(case)}
    return frozenset(chosen)


AT_EACH_COMMIT = _at_each_commit()
"""Arch and case of what is compiled without `--run-slow`."""
