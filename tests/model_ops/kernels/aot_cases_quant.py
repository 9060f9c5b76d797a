"""Linear layers with quantised weights: Kimi-K2.5 at TP8 and Llama-3 8B, decode and prefill."""

from __future__ import annotations

import torch
from aot_case import Case

from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.model_ops.registry import OpQuery

INT4_GROUP = WeightFormat("int4", 1, 32)
INT4_ZEROS = WeightFormat("int4", 1, 128, has_zeros=True)
NVFP4 = WeightFormat("fp4", 1, 16, "e4m3", has_row_scale=True)
MXFP4 = WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0"))
FP8_BLOCK = WeightFormat("fp8", 128, 128, activations=Activations("fp8", 128))
INT8 = WeightFormat("int8", has_row_scale=True, activations=Activations("int8"))
W4A8 = WeightFormat("int4", has_row_scale=True, activations=Activations("fp8"))


def empty_weights(form: WeightFormat, rows: int, inputs: int) -> QuantWeights:
    """Weights whose values are never read."""
    kinds = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    scales = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "float": torch.bfloat16}
    has_input_scale = form.activations is not None and (
        form.activations.is_static or form.activations.scale_type == "e4m3"
    )
    scale = zeros = None
    if form.columns:
        groups = -(-inputs // form.columns)
        scale = torch.empty(-(-rows // form.rows), groups, dtype=scales[form.scale_type])
        zeros = torch.empty(rows, groups, dtype=torch.uint8) if form.has_zeros else None
    return QuantWeights(
        form,
        torch.empty(rows, inputs, dtype=kinds[form.codes])
        if form.codes in kinds
        else torch.empty(rows, inputs // 2, dtype=torch.uint8),
        scale,
        zeros,
        torch.empty(rows) if form.has_row_scale else None,
        torch.empty(()) if has_input_scale else None,
    )


def _linear(
    form: WeightFormat,
    tokens: int,
    rows: int,
    inputs: int,
    *matrix: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        prepare = case.entry().load_prepare()
        weights = prepare(empty_weights(form, rows, inputs), query.dtype)
        return torch.empty(tokens, inputs, dtype=query.dtype), weights, None

    case = Case(
        f"quant_linear/{form} {rows}x{inputs} of {tokens}",
        "quant_linear",
        arguments,
        {"in_features": inputs, "out_features": rows},
        dtype=dtype,
        matrix=matrix or ("_quant_linear",),
        weights=form,
    )
    return case


CASES: tuple[Case, ...] = (
    *(_linear(INT4_GROUP, tokens, 512, 7168) for tokens in (1, 2048)),
    _linear(INT4_ZEROS, 16, 4096, 14336),
    _linear(NVFP4, 64, 4096, 4096),
    *(_linear(MXFP4, tokens, 512, 7168) for tokens in (16, 2048)),
    *(_linear(FP8_BLOCK, tokens, 512, 7168) for tokens in (1, 2048)),
    _linear(INT8, 2048, 4096, 4096),
    _linear(W4A8, 64, 7168, 2048),
)
