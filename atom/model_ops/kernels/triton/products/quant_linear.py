"""Products with quantised weights: dequantised tile by tile, or of codes with codes.

Results are batch-invariant: inputs are split by the shape of the weights alone, a split is one
accumulator over blocks of inputs in order, and splits are added in order. A program that takes all
splits of its outputs, and programs that take one each and whose last one adds them, give the same
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.quant_inputs import (
    as_they_are,
    is_exact,
    is_scaled,
    is_wide,
    limit_within,
    read_inputs,
)
from atom.model_ops.kernels.triton.products.quant_layout import (
    TileWeights,
    prepare_tiles,
    refuses_tiles,
)
from atom.model_ops.kernels.triton.products.quant_product import add_product, finish, no_sums
from atom.model_ops.kernels.triton.products.quant_splits import choose_splits, choose_tiles, tile_of
from atom.model_ops.kernels.triton.products.quantise import refuses_activations
from atom.model_ops.kernels.triton.splits import BUSY, add_splits, arrivals, arrives_last
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.quant.weights import QuantWeights
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

_GROUP_M = 8


def refuses(query: OpQuery) -> str | None:
    """Why the weights cannot be multiplied; None if they can."""
    form = query.weights
    if form is None:
        return None
    inputs = query.shape.get("in_features")
    reason = refuses_tiles(form, query.shape.get("out_features"), inputs, query.platform)
    if reason is None and form.activations is not None:
        reason = refuses_activations(form.activations, inputs)
    return reason


def prepare(weights: QuantWeights, _: torch.dtype) -> TileWeights:
    """The layout of `quant_layout`."""
    return prepare_tiles(weights, current_platform())


def quant_linear(x: Rows, weights: TileWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] -> [..., out], accumulated in float32, integers in int32."""
    return product(current_platform().kind, x, weights, bias)


def product(kind: str, x: Rows, weights: TileWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """`quant_linear` with the tiles of a platform `kind`."""
    limit = limit_within(x, weights)
    inputs = as_they_are(x, weights) if limit else read_inputs(x, weights)
    tokens, rows = inputs.numbers.shape[0], weights.rows
    out = inputs.numbers.new_empty(*x.shape[:-1], rows, dtype=x.dtype)
    if not tokens:
        return out
    wide = is_wide(inputs) and not limit
    tiles = choose_tiles(kind, tokens, wide, is_scaled(inputs, weights))
    splits = choose_splits(kind, rows, weights.inputs, weights.block_k)
    programs = triton.cdiv(tokens, tiles.block_m) * triton.cdiv(rows, tiles.block_n)
    apart = splits > 1 and programs < BUSY.get(kind, 1)
    exact = is_exact(inputs, weights)
    sums = arrived = None
    if apart:
        sums_dtype = torch.int32 if exact else torch.float32
        sums = out.new_empty(splits, tokens, rows, dtype=sums_dtype)
        arrived = arrivals(out.device)
    _quant_linear[(programs, splits if apart else 1)](
        inputs.numbers,
        inputs.scale,
        weights.codes,
        weights.scale,
        weights.zeros,
        weights.row_scale,
        bias,
        out,
        sums,
        arrived,
        tokens,
        weights.inputs,
        rows,
        *inputs.numbers.stride(),
        0 if inputs.scale is None else inputs.scale.stride(0),
        weights.codes.stride(0),
        **weights.constants(),
        X_GROUP=inputs.group,
        X_LIMIT=limit,
        IS_EXACT=exact,
        SPLITS=splits,
        APART=apart,
        WEIGHTS_FIRST=tiles.weights_first,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        GROUP_M=_GROUP_M,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **tiles.options,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _quant_linear(
    x_ptr,
    x_scale_ptr,
    codes_ptr,
    scale_ptr,
    zeros_ptr,
    row_scale_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    arrived_ptr,
    tokens,
    inputs,
    rows,
    stride_token,
    stride_input,
    stride_x_scale,
    stride_row,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    WAY: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_LIMIT: tl.constexpr,
    IS_EXACT: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of outputs [tokens, rows]; if APART, one split of it, by way of its part of the sums
    [splits, tokens, rows].

    Elements beyond the last token or row are computed from a valid address and not stored.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tokens, rows, BLOCK_M, BLOCK_N, GROUP_M)
    lanes_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.minimum(lanes_m, tokens - 1).to(tl.int64)
    places = tl.minimum(lanes_n, rows - 1)
    blocks = tl.cdiv(inputs, BLOCK_K)
    per_split = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(1) if APART else 0
    last = first + 1 if APART else SPLITS
    total = no_sums(BLOCK_M, BLOCK_N, IS_EXACT, WEIGHTS_FIRST)
    for split in range(first, last):
        start = split * per_split
        stop = tl.minimum(start + per_split, blocks)
        total += add_product(
            tl.zeros_like(total),
            x_ptr,
            x_scale_ptr,
            codes_ptr,
            scale_ptr,
            zeros_ptr,
            token,
            places,
            start,
            stop,
            inputs,
            rows,
            stride_token,
            stride_input,
            stride_x_scale,
            stride_row,
            WAY,
            CODES,
            ROWS,
            COLUMNS,
            SCALE_TYPE,
            HAS_ZEROS,
            X_GROUP,
            WEIGHTS_FIRST,
            WHOLE_K,
            X_LIMIT,
        )
    if WEIGHTS_FIRST:
        total = tl.trans(total)

    offsets = lanes_m.to(tl.int64)[:, None] * rows + lanes_n[None, :]
    mask = (lanes_m < tokens)[:, None] & (lanes_n < rows)[None, :]
    if APART:
        stride = tokens.to(tl.int64) * rows
        tl.store(sums_ptr + tl.program_id(1) * stride + offsets, total, mask=mask)
        if not arrives_last(arrived_ptr + tl.program_id(0)):
            return
        total = add_splits(sums_ptr + offsets, mask, stride)
    result = finish(total, x_scale_ptr, row_scale_ptr, bias_ptr, token, places, X_GROUP)
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
