"""Quantised experts of Kimi-K2.5 at TP8."""

from __future__ import annotations

from typing import Any

import torch
from aot_case import Case
from aot_cases_quant import empty_weights

from atom.model_ops.quant.weights import Activations, WeightFormat
from atom.model_ops.registry import OpQuery

EXPERTS, TOP_K, HIDDEN, INTER = 384, 8, 7168, 256
KIMI = WeightFormat("int4", 1, 32)
INT4_ZEROS = WeightFormat("int4", 1, 128, has_zeros=True)
DEEPSEEK = WeightFormat("fp8", 128, 128, activations=Activations("fp8", 128))
FP8_TOKEN = WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8"))
INT8_TOKEN = WeightFormat("int8", has_row_scale=True, activations=Activations("int8"))
MXFP4 = WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0"))
NVFP4 = WeightFormat("fp4", 1, 16, "e4m3", has_row_scale=True)


def _matrices(query: OpQuery, case: Case) -> list[object]:
    """Prepared weights: on the meta device, then of a real size in memory that nothing touches."""
    form = query.weights
    assert form is not None
    with torch.device("meta"):
        shapes = (2 * INTER, HIDDEN), (HIDDEN, INTER)
        stored = [empty_weights(form, EXPERTS, *shape) for shape in shapes]
        prepare = case.entry().load_prepare
        assert prepare is not None
        matrices = prepare()(*stored, query.dtype)
    for matrix in matrices:
        for name, value in vars(matrix).items():
            if isinstance(value, torch.Tensor):
                setattr(matrix, name, torch.empty(value.shape, dtype=value.dtype))
    return list(matrices)


def _experts(
    form: WeightFormat, num_tokens: int, *matrix: str, shared_is_plain: bool = False
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        matrices: list[Any] = _matrices(query, case)
        if shared_is_plain:
            matrices[0].plain = torch.empty(2 * INTER, HIDDEN, dtype=query.dtype)
            matrices[1].plain = torch.empty(HIDDEN, INTER, dtype=query.dtype)
        return (
            torch.empty(num_tokens, HIDDEN, dtype=query.dtype),
            *matrices,
            torch.empty(num_tokens, TOP_K),
            torch.empty(num_tokens, TOP_K, dtype=torch.int64),
        )

    case = Case(
        f"quant_experts/kimi tp8 {form} of {num_tokens}{' and plain' * shared_is_plain}",
        "quant_experts",
        arguments,
        {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTER},
        matrix=matrix or ("_grouped_quant", "_grouped_quant#2"),
        hands_over=("_grouped_quant",) if num_tokens == 1 else (),
        weights=form,
    )
    return case


CASES: tuple[Case, ...] = (
    *(_experts(KIMI, tokens) for tokens in (1, 64, 2048)),
    *(_experts(KIMI, tokens, shared_is_plain=True) for tokens in (8, 64, 2048)),
    _experts(DEEPSEEK, 64, shared_is_plain=True),
    _experts(INT4_ZEROS, 64),
    _experts(NVFP4, 64),
    *(_experts(MXFP4, tokens) for tokens in (64, 2048)),
    _experts(DEEPSEEK, 8192),
    _experts(FP8_TOKEN, 64),
    _experts(INT8_TOKEN, 2048),
)
