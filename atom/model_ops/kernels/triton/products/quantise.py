"""Quantisation of activations, bit for bit that of `torch.quantise` but for e4m3fnuz."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.quant_numbers import e2m1_numbers, scale_numbers
from atom.model_ops.quant.rounding import InputRounding, QuantInputs
from atom.model_ops.quant.weights import Activations

_LIMITS = {"int8": 127.0, "fp4": 6.0}
_TILE = 1024  # inputs per program, if groups allow
_LONGEST_ROW = 1 << 16
_SMALLEST_SCALE = tl.constexpr(1e-12)
# Added to and taken from a float32, this rounds it to an integer, ties to even.
_TO_INTEGER = tl.constexpr(12582912.0)


def refuses_activations(how: Activations, inputs: int | None) -> str | None:
    """Why inputs cannot be quantised so; None if they can."""
    if how.group and how.group & (how.group - 1):
        return f"activations in groups of {how.group}; kernels take powers of two"
    if not how.group and not how.is_static and inputs is not None and inputs > _LONGEST_ROW:
        return f"activations of {inputs} inputs; kernels take {_LONGEST_ROW} per scale"
    return None


def round_rows(x: torch.Tensor, rounding: InputRounding) -> QuantInputs:
    """x [T, n], rounded."""
    out = rounding.place(x)
    tokens, size = x.shape
    if not tokens:
        return out
    how, padded = rounding.how, rounding.padded(size)
    # A token's only scale needs all of its inputs.
    row = _TILE if how.is_static else max(triton.next_power_of_2(padded), 16)
    width = how.group or row
    count = max(_TILE // width, 1) if how.group else 1
    _quantise[(tokens, triton.cdiv(padded, count * width))](
        x,
        rounding.input_scale,
        out.numbers,
        out.scale,
        size,
        padded,
        *x.stride(),
        out.numbers.stride(0),
        **constants(rounding),
        GROUPS=count,
        GROUP=width,
        num_warps=max(1, min(16, count * width // 1024)),
    )
    return out


def constants(rounding: InputRounding) -> dict[str, object]:
    """The constexpr arguments of `store_rounded` that the rounding decides."""
    how = rounding.how
    return {
        "CODES": how.codes,
        "SCALE_TYPE": how.scale_type,
        "IS_STATIC": how.is_static,
        "IS_GROUPED": how.group > 0,
        "IS_PACKED": rounding.is_packed,
        "IS_FNUZ": rounding.fp8 is torch.float8_e4m3fnuz,
        "LIMIT": largest_code(rounding),
    }


def largest_code(rounding: InputRounding) -> float:
    return _LIMITS.get(rounding.how.codes) or torch.finfo(rounding.fp8).max


@triton.jit
def _quantise(
    x_ptr,
    input_scale_ptr,
    out_ptr,
    scale_ptr,
    size,
    padded,
    stride_token,
    stride_input,
    stride_out,
    CODES: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    IS_STATIC: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """GROUPS groups of one token."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_ptrs = x_ptr + token * stride_token + columns * stride_input
    x = tl.load(x_ptrs, mask=columns < size, other=0.0).to(tl.float32)
    store_rounded(
        x,
        token,
        group,
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
def store_rounded(
    x,
    token,
    group,
    input_scale_ptr,
    out_ptr,
    scale_ptr,
    padded,
    stride_out,
    CODES: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    IS_STATIC: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Round the groups `group` [GROUPS] of a token, x [GROUPS, GROUP] float32, 0 beyond its inputs.

    Numbers instead of codes if there is no place for scales.
    """
    GROUPS: tl.constexpr = x.shape[0]
    GROUP: tl.constexpr = x.shape[1]
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if IS_STATIC:
        scale = tl.load(input_scale_ptr) + tl.zeros([GROUPS], tl.float32)
    elif SCALE_TYPE == "e8m0":
        byte = e8m0_bytes(tl.max(tl.abs(x), axis=1), CODES, LIMIT)
        scale = scale_numbers(byte, SCALE_TYPE)
    elif SCALE_TYPE == "e4m3":
        one = tl.load(input_scale_ptr) + tl.zeros([GROUPS], tl.float32)
        local = tl.minimum(tl.div_rn(tl.max(tl.abs(x), axis=1), LIMIT * one), 448.0)
        scale = tl.maximum(local.to(tl.float8e4nv).to(tl.float32) * one, _SMALLEST_SCALE)
    else:
        scale = float_scales(x, LIMIT)
    values = in_range(x, scale, LIMIT)

    if scale_ptr is not None:
        places = tl.cdiv(padded, GROUP) * token + group if IS_GROUPED else token + group * 0
        number = byte if scale_ptr.dtype.element_ty == tl.uint8 else scale
        tl.store(scale_ptr + places, number, mask=group * GROUP < padded)
    out_ptrs = out_ptr + token * stride_out
    if IS_PACKED:
        low, high = tl.split(tl.reshape(e2m1_codes(values), [GROUPS, GROUP // 2, 2]))
        halves = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(out_ptrs + halves, (low | (high << 4)).to(tl.uint8), mask=halves < padded // 2)
    else:
        numbers = rounded(values, CODES, IS_FNUZ)
        if scale_ptr is None:
            numbers *= scale[:, None]
        tl.store(out_ptrs + columns, numbers.to(out_ptr.dtype.element_ty), mask=columns < padded)


@triton.jit
def float_scales(x, LIMIT: tl.constexpr):
    """The scales [GROUPS] of groups x [GROUPS, GROUP] float32."""
    amax = tl.max(tl.abs(x), axis=1)
    return tl.maximum(tl.div_rn(amax, tl.full(amax.shape, LIMIT, tl.float32)), _SMALLEST_SCALE)


@triton.jit
def in_range(x, scale, LIMIT: tl.constexpr):
    """x [GROUPS, GROUP] / scale [GROUPS], cut off where codes end."""
    values = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    return tl.minimum(tl.maximum(values, -LIMIT), LIMIT)


@triton.jit
def e8m0_bytes(amax, CODES: tl.constexpr, LIMIT: tl.constexpr):
    """The largest magnitudes of groups -> exponents, biased by 127."""
    if CODES == "fp4":
        # Its exponent less that of the largest code, 4; from 7/4 on the next power's exponent.
        exponent = ((amax.to(tl.int32, bitcast=True) + 0x200000) >> 23) - 2
    else:
        quotient = tl.div_rn(amax, tl.full(amax.shape, LIMIT, tl.float32))
        bits = quotient.to(tl.int32, bitcast=True)
        exponent = (bits + 0x7FFFFF) >> 23
        exponent = tl.where(bits <= 0x400000, 0, exponent)  # up to 2^-127
    return tl.minimum(tl.maximum(exponent, 0), 254).to(tl.uint8)


@triton.jit
def rounded(values, CODES: tl.constexpr, IS_FNUZ: tl.constexpr):
    """Numbers within the range of the codes -> those of the nearest codes, ties to even."""
    if CODES == "int8":
        numbers = (values + _TO_INTEGER) - _TO_INTEGER
    elif CODES == "fp8":
        if IS_FNUZ:
            numbers = values.to(tl.float8e4b8).to(tl.float32)
        else:
            numbers = values.to(tl.float8e4nv).to(tl.float32)
    else:
        numbers = e2m1_numbers(e2m1_codes(values))
    return numbers


@triton.jit
def e2m1_codes(values):
    """Numbers from -6 to 6 -> the nearest codes, ties to the even one; int32."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)
