"""RMS norm and the quantisation of its result in one launch, with the bits of one after the other.

A row's sum of squares is computed as in `rms_norm`, and the norm rounded to the type of the rows
before it is quantised as in `quantise`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.torch.elementwise import AddNorm, PairNorm
from atom.model_ops.kernels.triton.products.quant_layout import SPAN
from atom.model_ops.kernels.triton.products.quantise import constants, store_rounded
from atom.model_ops.kernels.triton.rms_norm import LARGEST_ROW, norm_part, normed_row, num_warps
from atom.model_ops.kernels.triton.support import refuses_parts
from atom.model_ops.quant.rounding import InputRounding, QuantInputs
from atom.model_ops.registry import OpQuery


def refuses_add(query: OpQuery) -> str | None:
    """Why one kernel cannot add, normalise and quantise; None if it can."""
    return refuses_parts("add_rms_norm") or _refuses(query)


def refuses_pair(query: OpQuery) -> str | None:
    """Why one kernel cannot compute both norms and quantise one; None if it can."""
    return refuses_parts("rms_norm", "rms_norm_pair") or _refuses(query)


def _refuses(query: OpQuery) -> str | None:
    """A program has the columns of a norm, which must hold whole groups and all padding."""
    assert query.weights is not None
    assert query.weights.activations is not None
    size, how = query.shape["size"], query.weights.activations
    least = max(SPAN, how.group)
    largest = max(size, query.shape.get("other_size", 0))
    if largest > LARGEST_ROW:
        return f"size={largest} is larger than {LARGEST_ROW}"
    if triton.next_power_of_2(size) < least:
        return f"size={size} is below {least // 2 + 1}, for groups and padding of {least}"
    return None


def add_rms_norm_quantise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: InputRounding,
    add_rms_norm: AddNorm,
) -> tuple[QuantInputs, torch.Tensor]:
    """The norm of x + residual, quantised, and x + residual; x and residual [T, size]. The norm
    itself, too, if `rounding` says so.

    Args:
        add_rms_norm: not called.
    """
    del add_rms_norm
    x, residual = _with_dense_rows(x), _with_dense_rows(residual)
    tokens, size = x.shape
    total = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    out = rounding.place(x)
    if rounding.keeps_rows:
        out = replace(out, rows=torch.empty_like(total))
    if not tokens:
        return out, total
    block = triton.next_power_of_2(size)
    _add_norm_quantise[(tokens,)](
        x,
        residual,
        weight.contiguous(),
        total,
        out.rows,
        *_places(rounding, out),
        rounding.padded(size),
        x.stride(0),
        residual.stride(0),
        out.numbers.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        GROUP=rounding.how.group or block,
        **constants(rounding),
        num_warps=num_warps(block),
    )
    return out, total


def rms_norm_pair_quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    other_weight: torch.Tensor,
    eps: float,
    rounding: InputRounding,
    rms_norm_pair: PairNorm,
) -> tuple[QuantInputs, torch.Tensor]:
    """The norms of the first a and the next b columns of x [T, a + b or more]; the first quantised.

    Args:
        weight, other_weight: [a], [b].
        rms_norm_pair: not called.
    """
    del rms_norm_pair
    x = _with_dense_rows(x)
    tokens, size, other_size = x.shape[0], len(weight), len(other_weight)
    out, other_out = rounding.place(x[:, :size]), x.new_empty(tokens, other_size)
    if not tokens:
        return out, other_out
    block, other_block = triton.next_power_of_2(size), triton.next_power_of_2(other_size)
    _norm_pair_quantise[(tokens, 2)](
        x,
        weight.contiguous(),
        other_weight.contiguous(),
        other_out,
        *_places(rounding, out),
        rounding.padded(size),
        x.stride(0),
        out.numbers.stride(0),
        eps,
        SIZE=size,
        OTHER_SIZE=other_size,
        BLOCK=block,
        OTHER_BLOCK=other_block,
        GROUP=rounding.how.group or block,
        **constants(rounding),
        num_warps=num_warps(max(block, other_block)),
    )
    return out, other_out


def _with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _places(rounding: InputRounding, out: QuantInputs) -> tuple[torch.Tensor | None, ...]:
    return rounding.input_scale, out.numbers, out.scale


@triton.jit
def _add_norm_quantise(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    rows_ptr,
    input_scale_ptr,
    out_ptr,
    scale_ptr,
    padded,
    stride_x,
    stride_residual,
    stride_out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    IS_STATIC: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row * stride_residual + columns, mask=mask, other=0.0).to(
        tl.float32
    )
    total = x.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * SIZE + columns, total, mask=mask)
    normed = normed_row(total.to(tl.float32), weight_ptr, columns, mask, eps, SIZE).to(total.dtype)
    if rows_ptr is not None:
        tl.store(rows_ptr + row * SIZE + columns, normed, mask=mask)
    store_rounded(
        tl.reshape(normed.to(tl.float32), [BLOCK // GROUP, GROUP]),
        row,
        tl.arange(0, BLOCK // GROUP),
        input_scale_ptr,
        out_ptr,
        scale_ptr,
        padded,
        stride_out,
        CODES,
        SCALE_TYPE,
        IS_STATIC,
        IS_GROUPED,
        IS_PACKED,
        IS_FNUZ,
        LIMIT,
    )


@triton.jit
def _norm_pair_quantise(
    x_ptr,
    weight_ptr,
    other_weight_ptr,
    other_out_ptr,
    input_scale_ptr,
    out_ptr,
    scale_ptr,
    padded,
    stride_x,
    stride_out,
    eps,
    SIZE: tl.constexpr,
    OTHER_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    IS_STATIC: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid: rows, their two parts."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    if tl.program_id(1) == 0:
        columns = tl.arange(0, BLOCK)
        mask = columns < SIZE
        x = tl.load(x_ptr + columns, mask=mask, other=0.0)
        normed = normed_row(x.to(tl.float32), weight_ptr, columns, mask, eps, SIZE)
        store_rounded(
            tl.reshape(normed.to(x.dtype).to(tl.float32), [BLOCK // GROUP, GROUP]),
            row,
            tl.arange(0, BLOCK // GROUP),
            input_scale_ptr,
            out_ptr,
            scale_ptr,
            padded,
            stride_out,
            CODES,
            SCALE_TYPE,
            IS_STATIC,
            IS_GROUPED,
            IS_PACKED,
            IS_FNUZ,
            LIMIT,
        )
    else:
        other_out_ptr += row * OTHER_SIZE
        norm_part(x_ptr + SIZE, other_weight_ptr, other_out_ptr, eps, OTHER_SIZE, OTHER_BLOCK)
