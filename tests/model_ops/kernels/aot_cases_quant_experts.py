"""Quantised experts of Kimi-K2.5 and, with its gate, of K3, at TP8."""

from __future__ import annotations

from typing import Any

import torch
from aot_case import Case
from aot_cases_moe import K3_TP8, KIMI_TP8, SITU, Experts
from aot_cases_quant import empty_weights

from atom.model_ops.quant.weights import Activations, WeightFormat
from atom.model_ops.registry import OpQuery

KIMI = WeightFormat("int4", 1, 32)
INT4_ZEROS = WeightFormat("int4", 1, 128, has_zeros=True)
DEEPSEEK = WeightFormat("fp8", 128, 128, activations=Activations("fp8", 128))
FP8_TOKEN = WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8"))
INT8_TOKEN = WeightFormat("int8", has_row_scale=True, activations=Activations("int8"))
MXFP4 = WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0"))
NVFP4 = WeightFormat("fp4", 1, 16, "e4m3", has_row_scale=True)
K3 = WeightFormat("fp4", 1, 32, "e8m0")


def _matrices(query: OpQuery, case: Case, sizes: Experts) -> list[object]:
    """Prepared weights: on the meta device, then of a real size in memory that nothing touches."""
    form = query.weights
    assert form is not None
    with torch.device("meta"):
        shapes = (2 * sizes.inter, sizes.hidden), (sizes.hidden, sizes.inter)
        stored = [empty_weights(form, sizes.experts, *shape) for shape in shapes]
        prepare = case.entry().load_prepare
        assert prepare is not None
        matrices = prepare()(*stored, query.dtype)
    for matrix in matrices:
        for name, value in vars(matrix).items():
            if isinstance(value, torch.Tensor):
                setattr(matrix, name, torch.empty(value.shape, dtype=value.dtype))
    return list(matrices)


def _experts(
    form: WeightFormat, num_tokens: int, *, shared_is_plain: bool = False, is_k3: bool = False
) -> Case:
    sizes = K3_TP8 if is_k3 else KIMI_TP8

    def arguments(query: OpQuery) -> tuple[object, ...]:
        matrices: list[Any] = _matrices(query, case, sizes)
        if shared_is_plain:
            matrices[0].plain = torch.empty(2 * sizes.inter, sizes.hidden, dtype=query.dtype)
            matrices[1].plain = torch.empty(sizes.hidden, sizes.inter, dtype=query.dtype)
        return (
            torch.empty(num_tokens, sizes.hidden, dtype=query.dtype),
            *matrices,
            torch.empty(num_tokens, sizes.top_k),
            torch.empty(num_tokens, sizes.top_k, dtype=torch.int64),
            *((0, SITU) if is_k3 else ()),
        )

    case = Case(
        f"quant_experts/{'kimi k3' if is_k3 else 'kimi'} tp8 {form} of {num_tokens}"
        f"{' and plain' * shared_is_plain}",
        "quant_experts",
        arguments,
        {**sizes.shape, "situ": int(is_k3)},
        matrix=("_grouped_quant", "_grouped_quant#2"),
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
    *(_experts(K3, tokens, is_k3=True) for tokens in (64, 2048)),
)
