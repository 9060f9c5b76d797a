"""Linear layers with quantised weights: Kimi-K2.5 at TP8 and Llama-3 8B, decode and prefill."""

from __future__ import annotations

from dataclasses import replace

import torch
from aot_case import Case

from atom.model_ops.kernels.triton.products.quant_layout import prepare_tiles
from atom.model_ops.quant.rounding import InputRounding
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.model_ops.registry import OpQuery

INT4_GROUP = WeightFormat("int4", 1, 32)
INT4_ZEROS = WeightFormat("int4", 1, 128, has_zeros=True)
NVFP4 = WeightFormat("fp4", 1, 16, "e4m3", has_row_scale=True)
MXFP4 = WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0"))
FP8_BLOCK = WeightFormat("fp8", 128, 128, activations=Activations("fp8", 128))
INT8 = WeightFormat("int8", has_row_scale=True, activations=Activations("int8"))
FP8_TOKEN = WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8"))
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
    is_split: bool = False,
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
        hands_over=("_quant_linear",) if is_split else (),
        weights=form,
    )
    return case


def _rounding(query: OpQuery) -> InputRounding | None:
    """Of the inputs of a product as this arch has it."""
    assert query.weights is not None
    rows, inputs = 64, query.shape["size"]
    return prepare_tiles(empty_weights(query.weights, rows, inputs), query.platform).rounding


def _add_norm(form: WeightFormat, size: int, tokens: int = 64, *, keeps_rows: bool = False) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        x, weight = torch.empty(tokens, size, dtype=query.dtype), torch.empty(size)
        rounding = _rounding(query)
        assert rounding is not None
        rounding = replace(rounding, keeps_rows=keeps_rows)
        return x, x, weight.to(query.dtype), 1e-5, rounding, None

    op, kept = "add_rms_norm_quantise", " and rows" * keeps_rows
    return Case(
        f"{op}/{form.activations} {size}{kept}", op, arguments, {"size": size}, weights=form
    )


def _latent_norms(form: WeightFormat) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        x = torch.empty(64, 1536 + 512 + 64, dtype=query.dtype)
        weights = (torch.empty(size, dtype=query.dtype) for size in (1536, 512))
        return x, *weights, 1e-6, _rounding(query), None

    op = "rms_norm_pair_quantise"
    sizes = {"size": 1536, "other_size": 512}
    return Case(f"{op}/{form.activations}", op, arguments, sizes, weights=form)


CASES: tuple[Case, ...] = (
    *(_linear(INT4_GROUP, tokens, 512, 7168, is_split=True) for tokens in (1, 2048)),
    _linear(INT4_ZEROS, 16, 4096, 14336),
    _linear(NVFP4, 64, 4096, 4096),
    *(_linear(MXFP4, tokens, 512, 7168) for tokens in (16, 2048)),
    *(_linear(FP8_BLOCK, tokens, 512, 7168, is_split=True) for tokens in (1, 2048)),
    _linear(FP8_BLOCK, 16, 7168, 1024),
    _linear(INT8, 2048, 4096, 4096),
    _linear(W4A8, 64, 7168, 2048),
    *(_add_norm(form, 7168) for form in (FP8_BLOCK, FP8_TOKEN, MXFP4)),
    _add_norm(FP8_BLOCK, 7168, keeps_rows=True),
    _add_norm(INT8, 4096),
    *(_latent_norms(form) for form in (FP8_BLOCK, FP8_TOKEN)),
)
