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


_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALES = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "float": torch.bfloat16}


def empty_weights(form: WeightFormat, *shape: int) -> QuantWeights:
    """Weights [out, in] or [experts, out, in] whose values are never read."""
    *experts, rows, inputs = shape
    scale = zeros = None
    if form.columns:
        groups = -(-inputs // form.columns)
        blocks = *experts, -(-rows // form.rows), groups
        scale = torch.empty(blocks, dtype=_SCALES[form.scale_type])
        zeros = torch.empty(*experts, rows, groups, dtype=torch.uint8) if form.has_zeros else None
    codes = _CODES.get(form.codes)
    return QuantWeights(
        form,
        torch.empty(*experts, rows, inputs // 2, dtype=torch.uint8)
        if codes is None
        else torch.empty(shape, dtype=codes),
        scale,
        zeros,
        torch.empty(*experts, rows) if form.has_row_scale else None,
        torch.empty(()) if form.has_input_scale else None,
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
