"""The numbers that codes and scales of quantised weights stand for; see `quant_layout`."""

from __future__ import annotations

import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.quant_layout import PART

_PART = tl.constexpr(PART)


@triton.jit
def dequantised(
    codes,
    part: tl.constexpr,
    first,
    scale_ptr,
    zeros_ptr,
    places,
    inputs,
    rows,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """The weights of PART inputs from `first` on, float32 [BLOCK_N, PART], without row scales.

    codes: [BLOCK_N, PART] bytes; `part` says which four bits of them.
    """
    values = code_values(codes, part, CODES, HAS_ZEROS)
    if COLUMNS >= _PART:
        # Padding may lie beyond the last group.
        group = tl.minimum(first // COLUMNS, (inputs - 1) // COLUMNS)
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + group * rows + places).to(tl.float32)
            values -= zeros[:, None]
        scale = tl.load(scale_ptr + group * tl.cdiv(rows, ROWS) + places // ROWS)
        values *= scale_numbers(scale, SCALE_TYPE)[:, None]
    elif COLUMNS > 0:
        GROUPS: tl.constexpr = _PART // COLUMNS
        groups = first // COLUMNS + tl.arange(0, GROUPS)
        groups = tl.minimum(groups, (inputs - 1) // COLUMNS)[None, :]
        values = tl.reshape(values, [values.shape[0], GROUPS, COLUMNS])
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + groups * rows + places[:, None]).to(tl.float32)
            values -= zeros[:, :, None]
        scale = tl.load(scale_ptr + groups * tl.cdiv(rows, ROWS) + (places // ROWS)[:, None])
        values *= scale_numbers(scale, SCALE_TYPE)[:, :, None]
        values = tl.reshape(values, [values.shape[0], _PART])
    return values


@triton.jit
def code_values(codes, part: tl.constexpr, CODES: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """What codes stand for, float32."""
    if CODES == "int4":
        values = ((codes >> (4 * part)) & 15).to(tl.float32)
        if not HAS_ZEROS:
            values -= 8.0
    elif CODES == "fp4":
        values = e2m1_numbers(codes >> (4 * part))
    else:
        values = codes.to(tl.float32)
    return values


@triton.jit
def e2m1_numbers(codes):
    """What the low four bits of integers stand for, float32."""
    codes = codes.to(tl.int16)
    # Exponent and mantissa go to those of a float16, whose bias is larger by 14.
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def scale_numbers(scale, SCALE_TYPE: tl.constexpr):
    """What stored scales stand for, float32."""
    if SCALE_TYPE == "e8m0":
        bits = scale.to(tl.int32) << 23
        # 2^-127 is denormal.
        numbers = tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)
    else:
        numbers = scale.to(tl.float32)
    return numbers
