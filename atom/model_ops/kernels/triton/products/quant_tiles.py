"""The ways in which `quant_product` multiplies inputs and quantised weights, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.quant_layout import PART, SPAN
from atom.model_ops.kernels.triton.products.quant_numbers import (
    code_values,
    dequantised,
    scale_numbers,
)
from atom.model_ops.kernels.triton.products.quantise import float_scales, in_range, rounded

_PART = tl.constexpr(PART)
_SPAN = tl.constexpr(SPAN)
_E2M1 = tl.constexpr("e2m1")


@triton.jit
def number_product(
    acc,
    x_ptrs,
    codes_ptr,
    scale_ptr,
    zeros_ptr,
    places,
    start,
    stop,
    inputs,
    rows,
    stride_input,
    stride_row,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
):
    """`add_product` of weights that are dequantised to the type of x.

    x_ptrs: [BLOCK_M], the first input of each row of x.
    """
    PARTS: tl.constexpr = 2 if CODES == "int4" or CODES == "fp4" else 1
    BLOCK_K: tl.constexpr = PARTS * _PART
    lanes = tl.arange(0, _PART)
    code_ptrs = codes_ptr + places[:, None] * stride_row + lanes[None, :]
    for block in range(start, stop):
        codes = tl.load(code_ptrs + block * _PART)
        for part in tl.static_range(PARTS):
            first = block * BLOCK_K + part * _PART
            input_ptrs = x_ptrs[:, None] + (first + lanes)[None, :] * stride_input
            if WHOLE_K:
                x = tl.load(input_ptrs)
            else:
                x = tl.load(input_ptrs, mask=(first + lanes < inputs)[None, :], other=0.0)
            weight = dequantised(
                codes,
                part,
                first,
                scale_ptr,
                zeros_ptr,
                places,
                inputs,
                rows,
                CODES,
                ROWS,
                COLUMNS,
                SCALE_TYPE,
                HAS_ZEROS,
            ).to(x.dtype)
            if WEIGHTS_FIRST:
                acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
            else:
                acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def code_product(
    acc,
    x_ptrs,
    x_scale_ptrs,
    codes_ptr,
    scale_ptr,
    places,
    start,
    stop,
    rows,
    stride_row,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_LIMIT: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """`add_product` of int8 or FP8 codes, whose scales are constant over SPAN inputs.

    Args:
        acc: int32 for integers without other scales (COLUMNS and X_GROUP 0).
        x_ptrs: [BLOCK_M], the first code of each row of x, of whole spans.
        x_scale_ptrs: [BLOCK_M], the first scale of each row; read if X_GROUP > 0.
        X_GROUP: a multiple of SPAN, or 0.
        X_LIMIT: if above 0, x has numbers that are rounded here, in groups of SPAN, to codes up to
            this one; weights have eight bits then.
    """
    PARTS: tl.constexpr = 2 if CODES == "int4" else 1
    WIDTH: tl.constexpr = _SPAN // PARTS
    IS_SCALED: tl.constexpr = COLUMNS > 0 or X_GROUP > 0
    ROUNDS: tl.constexpr = X_LIMIT > 0
    IS_INTEGER: tl.constexpr = CODES == "int8" if ROUNDS else x_ptrs.dtype.element_ty == tl.int8
    SUM_TYPE: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    lanes = tl.arange(0, WIDTH)
    code_ptrs = codes_ptr + places[:, None] * stride_row + lanes[None, :]
    for block in range(start, stop):
        codes = tl.load(code_ptrs + block * WIDTH)
        products = tl.zeros(acc.shape, SUM_TYPE) if IS_SCALED else acc
        for part in tl.static_range(PARTS):
            x = tl.load(x_ptrs[:, None] + (lanes + block * _SPAN + part * WIDTH)[None, :])
            if ROUNDS:
                wide = x.to(tl.float32)
                x_scale = float_scales(wide, X_LIMIT)
                is_fnuz: tl.constexpr = codes.dtype == tl.float8e4b8
                x = rounded(in_range(wide, x_scale, X_LIMIT), CODES, is_fnuz).to(codes.dtype)
            if CODES != "int4":
                weight = codes
            elif IS_INTEGER:
                weight = ((codes >> (4 * part)) & 15).to(tl.int8) - 8
            else:
                weight = code_values(codes, part, CODES, False).to(x.dtype)
            # Hopper's FP8 accumulators are narrow: they are added to float32 after each product.
            if WEIGHTS_FIRST:
                products = tl.dot(
                    weight,
                    tl.trans(x),
                    products,
                    max_num_imprecise_acc=WIDTH,
                    out_dtype=SUM_TYPE,
                )
            else:
                products = tl.dot(
                    x,
                    tl.trans(weight),
                    products,
                    max_num_imprecise_acc=WIDTH,
                    out_dtype=SUM_TYPE,
                )
        if IS_SCALED:
            products = products.to(tl.float32)
            if X_GROUP > 0:
                if not ROUNDS:
                    x_scale = tl.load(x_scale_ptrs + block * _SPAN // X_GROUP)
                products *= x_scale[None, :] if WEIGHTS_FIRST else x_scale[:, None]
            if COLUMNS > 0:
                group_ptr = scale_ptr + (block * _SPAN // COLUMNS) * tl.cdiv(rows, ROWS)
                scale = scale_numbers(tl.load(group_ptr + places // ROWS), SCALE_TYPE)
                products *= scale[:, None] if WEIGHTS_FIRST else scale[None, :]
            acc += products
        else:
            acc = products
    return acc


@triton.jit
def mx_product(
    acc,
    x_ptrs,
    x_scale_ptrs,
    codes_ptr,
    scale_ptr,
    places,
    start,
    stop,
    inputs,
    rows,
    stride_row,
):
    """`add_product` of MXFP4 codes, both with neighbours in a byte.

    x_ptrs, x_scale_ptrs: [BLOCK_M], of packed codes and e8m0 scales of whole spans.
    """
    GROUPS: tl.constexpr = _SPAN // 32
    lanes, groups = tl.arange(0, _SPAN // 2), tl.arange(0, GROUPS)
    code_ptrs = codes_ptr + places[:, None] * stride_row + lanes[None, :]
    for block in range(start, stop):
        x = tl.load(x_ptrs[:, None] + (lanes + block * (_SPAN // 2))[None, :])
        x_scale = tl.load(x_scale_ptrs[:, None] + (groups + block * GROUPS)[None, :])
        codes = tl.load(code_ptrs + block * (_SPAN // 2))
        # Padding may lie beyond the last group.
        known = tl.minimum(groups + block * GROUPS, (inputs - 1) // 32)[None, :]
        scale = tl.load(scale_ptr + known * rows + places[:, None])
        acc = tl.dot_scaled(x, x_scale, _E2M1, tl.trans(codes), scale, _E2M1, acc)
    return acc
