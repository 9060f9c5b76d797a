"""A product of inputs and quantised weights, as kernels of linear layers and experts compute it."""

from __future__ import annotations

import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.quant_tiles import (
    code_product,
    mx_product,
    number_product,
)


@triton.jit
def no_sums(
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_EXACT: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """Zeros to add products to: int32 if IS_EXACT, as products of integers without scales are."""
    SUM_TYPE: tl.constexpr = tl.int32 if IS_EXACT else tl.float32
    if WEIGHTS_FIRST:
        acc = tl.zeros([BLOCK_N, BLOCK_M], SUM_TYPE)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], SUM_TYPE)
    return acc


@triton.jit
def add_product(
    acc,
    x_ptr,
    x_scale_ptr,
    codes_ptr,
    scale_ptr,
    zeros_ptr,
    tokens,
    places,
    start,
    stop,
    inputs,
    rows,
    stride_x,
    stride_input,
    stride_x_scale,
    stride_row,
    WAY: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    X_GROUP: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
    X_LIMIT: tl.constexpr = 0.0,
):
    """acc + x @ weights.T over the blocks `start` to `stop`, as WAY says; see `choose_way`.

    Scales of tokens and of rows are left to `finish`: they multiply the sums.

    Args:
        acc: from `no_sums`.
        x_ptr, x_scale_ptr: `QuantInputs`; rows, and nothing, if X_LIMIT is above 0.
        codes_ptr, scale_ptr, zeros_ptr: of one matrix; None where there are none.
        tokens: int64 [BLOCK_M], valid rows of x.
        places: int32 [BLOCK_N], valid rows of the matrix.
        start, stop: numbers of blocks of `TileWeights.block_k` inputs.
        inputs, rows: of the matrix, without padding.
        stride_x, stride_input: between rows and inputs of x.
        stride_x_scale: between rows of its scales.
        stride_row: bytes between rows of codes.
        X_GROUP: inputs per scale of x, or 0 for one scale per token.
        WEIGHTS_FIRST: multiply weights by x, not x by weights.
        X_LIMIT: see `code_product`.

    The other constants are those of `TileWeights.constants`.
    """
    x_ptrs = x_ptr + tokens * stride_x
    if WAY == "numbers":
        acc = number_product(
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
            CODES,
            ROWS,
            COLUMNS,
            SCALE_TYPE,
            HAS_ZEROS,
            WEIGHTS_FIRST,
            WHOLE_K,
        )
    elif WAY == "codes":
        acc = code_product(
            acc,
            x_ptrs,
            None if X_LIMIT > 0 else x_scale_ptr + tokens * stride_x_scale,
            codes_ptr,
            scale_ptr,
            places,
            start,
            stop,
            rows,
            stride_row,
            CODES,
            ROWS,
            COLUMNS,
            SCALE_TYPE,
            X_GROUP,
            X_LIMIT,
            WEIGHTS_FIRST,
        )
    else:
        acc = mx_product(
            acc,
            x_ptrs,
            x_scale_ptr + tokens * stride_x_scale,
            codes_ptr,
            scale_ptr,
            places,
            start,
            stop,
            inputs,
            rows,
            stride_row,
        )
    return acc


@triton.jit
def finish(total, x_scale_ptr, row_scale_ptr, bias_ptr, tokens, places, X_GROUP: tl.constexpr = 0):
    """Sums [tokens, rows] to outputs, float32; `tokens` and `places` are valid indices.

    x_scale_ptr: of each token, or None; not read if X_GROUP > 0, since `add_product` did.
    """
    result = total.to(tl.float32)
    if X_GROUP == 0 and x_scale_ptr is not None:
        result *= tl.load(x_scale_ptr + tokens)[:, None]
    if row_scale_ptr is not None:
        result *= tl.load(row_scale_ptr + places)[None, :]
    if bias_ptr is not None:
        result += tl.load(bias_ptr + places).to(tl.float32)[None, :]
    return result
