"""Every kernel in the shapes in which the engine launches it.

A long family of cases has a file of its own, `aot_cases_<what>.py`, and is joined in here. Run
some of them with `pytest tests/model_ops/kernels/test_aot.py -k "<part of the name>"`.
"""

from __future__ import annotations

import aot_cases_attention
import aot_cases_elementwise
import aot_cases_gluon
import aot_cases_mla
import aot_cases_moe
import aot_cases_quant
import aot_cases_quant_experts
from aot_case import Case

CASES: tuple[Case, ...] = (
    *aot_cases_attention.CASES,
    *aot_cases_elementwise.CASES,
    *aot_cases_gluon.CASES,
    *aot_cases_mla.CASES,
    *aot_cases_moe.CASES,
    *aot_cases_quant.CASES,
    *aot_cases_quant_experts.CASES,
)
