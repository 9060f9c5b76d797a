"""Quantised weights as the ops get them, whatever the checkpoint's format.

    W[o, i] = (q[o, i] - z[o, i // columns]) * scale[o // rows, i // columns] * row_scale[o]
              + offset[o, i // columns]

A format has the terms that it needs. Scales of a whole tensor are expanded to `row_scale`, so that
matrices with different ones can be stacked. Where scales have scales, `scale` and `offset` stand
for `scale * super_scale[o, i // super_columns]` and `offset * super_offset[o, i // super_columns]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from typing import Literal

import torch

Codes = Literal["int4", "int6", "int8", "fp8", "fp4"]
ScaleType = Literal["float", "e8m0", "e4m3", "int8"]

# e2m1: bit 3 is the sign.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# int4 and int6 codes are stored without a sign; these stand for zero if there are neither zero
# points nor offsets.
INT4_ZERO = 8
INT6_ZERO = 32
_IMPLICIT_ZEROS: Mapping[str, int] = {"int4": INT4_ZERO, "int6": INT6_ZERO}
_CODES_PER_BYTE = {"int4": Fraction(2), "fp4": Fraction(2), "int6": Fraction(4, 3)}


@dataclass(frozen=True)
class Activations:
    """How the inputs of a product are quantised.

    Attributes:
        codes: `int8`, `int12`, `int16` (of 15 bits), `fp8` (the device's e4m3) or `fp4`.
        group: inputs per scale; 0 for one scale per token.
        scale_type: `float`: amax / 127, 1904, 16383, 448 or 6. `e8m0`: for `fp8` the smallest
            power of two that is at least amax / 448; for `fp4` 2^(floor(log2(amax)) - 2), where an
            amax of 7/4 of a power of two or more counts as the next one, as Quark (`even`) and
            compressed-tensors round. `e4m3`: per group, times `QuantWeights.input_scale`.
        is_static: the scale is `QuantWeights.input_scale`, whatever the inputs.
    """

    codes: Literal["int8", "int12", "int16", "fp8", "fp4"]
    group: int = 0
    scale_type: ScaleType = "float"
    is_static: bool = False

    def __str__(self) -> str:
        scale = "static" if self.is_static else f"group {self.group}" if self.group else "token"
        return f"{self.codes} per {scale}".replace("per static", "static") + (
            "" if self.scale_type == "float" else f" {self.scale_type}"
        )


@dataclass(frozen=True)
class WeightFormat:
    """How quantised weights are stored and multiplied.

    Attributes:
        codes: `int4` and `fp4` are two to a byte, `int6` four to three bytes.
        rows, columns: block of weights that shares one `scale`; 0, 0 without such scales.
        scale_type: `e8m0` bytes b are 2^(b - 127), `e4m3` is float8_e4m3fn, `int8` numbers have
            scales themselves.
        has_zeros: whether there are zero points (of integers).
        has_row_scale: whether there is one scale per output.
        activations: None if inputs are not quantised.
        has_offsets: whether there is an offset for each group of inputs; `rows` is 1. Codes of
            integers then count from 0.
        super_columns: inputs that share a scale of their `int8` scales, and of their offsets; 0
            without such scales.
    """

    codes: Codes
    rows: int = 0
    columns: int = 0
    scale_type: ScaleType = "float"
    has_zeros: bool = False
    has_row_scale: bool = False
    activations: Activations | None = None
    has_offsets: bool = False
    super_columns: int = 0

    def __post_init__(self) -> None:
        if self.has_zeros and not self.columns:
            raise ValueError("zero points belong to groups of inputs: `columns` is missing")
        if self.has_offsets and (self.rows != 1 or self.has_zeros or self.has_row_scale):
            raise ValueError("offsets belong to groups of inputs with one scale and no zero point")
        if (self.scale_type == "int8") != bool(self.super_columns):
            raise ValueError("int8 scales have scales, and only they: `super_columns`")
        if self.super_columns and (self.rows != 1 or self.super_columns % self.columns):
            raise ValueError("scales that share a scale belong to whole groups of inputs")

    @property
    def codes_per_byte(self) -> Fraction:
        """Four thirds for `int6`."""
        return _CODES_PER_BYTE.get(self.codes, Fraction(1))

    @property
    def zero(self) -> int:
        """The code that stands for zero if there are no zero points."""
        return 0 if self.has_offsets else _IMPLICIT_ZEROS.get(self.codes, 0)

    @property
    def has_input_scale(self) -> bool:
        """Whether there is one scale of a product's inputs, which the checkpoint has."""
        how = self.activations
        return how is not None and (how.is_static or how.scale_type == "e4m3")

    def __str__(self) -> str:
        block = f" group {self.columns}" if self.rows == 1 else f" block {self.rows}x{self.columns}"
        parts = [self.codes + (block if self.columns else " channel")]
        if self.super_columns:
            parts.append(f"of {self.super_columns}")
        elif self.scale_type != "float":
            parts.append(self.scale_type)
        if self.has_zeros:
            parts.append("with zeros")
        if self.has_offsets:
            parts.append("with offsets")
        parts.append("weight-only" if self.activations is None else f"x {self.activations}")
        return " ".join(parts)


@dataclass
class QuantWeights:
    """A matrix [out, in], or those of all experts with a leading dimension [experts].

    Attributes:
        codes: int8 or float8_e4m3fn [out, in]; int4 and fp4: uint8 [out, in / 2], element 2j in the
            low four bits of byte j. int4 codes are 0..15. int6: uint8 [out, 3 * in / 4] of values
            0..63; of each row first the low four bits, as int4, in in / 2 bytes, then the high two
            bits, element 4j in the lowest bits of byte j.
        scale: [ceil(out / rows), ceil(in / columns)], float16, bfloat16 or float32; uint8 for
            `e8m0`, float8_e4m3fn for `e4m3`, int8.
        zeros: [out, ceil(in / columns)]: uint8 of 0..16 for int4, int8 for int8; float16 if they
            lie between codes.
        row_scale: float32 [out].
        input_scale: float32 [], for static and `e4m3` activation scales.
        column_order: int64 [in]; the product is of `x[..., column_order]` and these columns.
        offset: [out, ceil(in / columns)], of the dtype of `scale`.
        super_scale, super_offset: float16 [out, ceil(in / super_columns)]; the latter if there are
            offsets.
    """

    format: WeightFormat
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    column_order: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    super_scale: torch.Tensor | None = None
    super_offset: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """out, in of one matrix."""
        out, stored = self.codes.shape[-2:]
        return out, int(stored * self.format.codes_per_byte)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def experts(self, start: int, stop: int) -> QuantWeights:
        """Views of the experts `start` to `stop`."""

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[start:stop]

        return replace(
            self,
            codes=self.codes[start:stop],
            scale=cut(self.scale),
            zeros=cut(self.zeros),
            row_scale=cut(self.row_scale),
            offset=cut(self.offset),
            super_scale=cut(self.super_scale),
            super_offset=cut(self.super_offset),
        )


def dequantise(weights: QuantWeights, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [..., out, in], rounded once to `dtype`; columns in the order of the inputs.

    The products are computed in float32, or in float64 if that is asked for. Scales are multiplied
    with their scales first, as in GGUF.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    values = _code_values(weights, wide)
    out, columns = weights.shape
    form = weights.format
    if weights.zeros is not None:
        values = values - _spread(weights.zeros.to(wide), 1, form.columns, out, columns)
    elif form.zero:
        values = values - form.zero
    if weights.scale is not None:
        scale = scale_values(weights.scale, form.scale_type, wide)
        scale = _scaled(scale, weights.super_scale, form)
        values = values * _spread(scale, form.rows, form.columns, out, columns)
    if weights.row_scale is not None:
        values = values * weights.row_scale.to(wide)[..., None]
    if weights.offset is not None:
        offset = _scaled(weights.offset.to(wide), weights.super_offset, form)
        values = values + _spread(offset, 1, form.columns, out, columns)
    if weights.column_order is not None:
        values = values[..., weights.column_order.argsort()]
    return values.to(dtype)


def scale_values(
    scale: torch.Tensor, scale_type: ScaleType, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The numbers that stored scales stand for."""
    if scale_type == "e8m0":
        return torch.exp2(scale.to(torch.float64) - 127).to(dtype)
    return scale.to(dtype)


def held_bytes(prepared: object) -> int:
    """Of all tensors in what an op's `prepare` returned, whatever its form."""
    return sum(tensor.nbytes for tensor in _held(prepared).values())


def _held(prepared: object) -> dict[int, torch.Tensor]:
    """The tensors, each once, by identity."""
    if isinstance(prepared, torch.Tensor):
        return {id(prepared): prepared}
    items: list[object] = []
    if isinstance(prepared, tuple):
        items = list(prepared)
    elif is_dataclass(prepared) and not isinstance(prepared, type):
        items = [getattr(prepared, item.name) for item in fields(prepared)]
    return {key: tensor for item in items for key, tensor in _held(item).items()}


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> uint8 [..., 2n], the low four bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2n] of values 0..15 -> uint8 [..., n], the low four bits first."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_int6(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 3n] as `QuantWeights` has int6 codes -> uint8 [..., 4n] of values 0..63."""
    middle = packed.shape[-1] // 3 * 2
    low, high = packed[..., :middle], packed[..., middle:]
    pairs = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return unpack_nibbles(low) | (pairs.flatten(-2) << 4)


def pack_int6(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4n] of values 0..63 -> uint8 [..., 3n]."""
    high = codes >> 4
    high = high[..., ::4] | (high[..., 1::4] << 2) | (high[..., 2::4] << 4) | (high[..., 3::4] << 6)
    return torch.cat((pack_nibbles(codes & 15), high), dim=-1)


def _code_values(weights: QuantWeights, dtype: torch.dtype) -> torch.Tensor:
    codes = weights.codes
    if weights.format.codes == "int4":
        return unpack_nibbles(codes).to(dtype)
    if weights.format.codes == "int6":
        return unpack_int6(codes).to(dtype)
    if weights.format.codes == "fp4":
        positive = torch.tensor(FP4_VALUES, dtype=dtype, device=codes.device)
        return torch.cat((positive, -positive))[unpack_nibbles(codes).long()]
    return codes.to(dtype)


def _scaled(numbers: torch.Tensor, scale: torch.Tensor | None, form: WeightFormat) -> torch.Tensor:
    """Numbers [..., out, groups], times their scales if there are any."""
    if scale is None:
        return numbers
    wide = scale.to(numbers.dtype).repeat_interleave(form.super_columns // form.columns, dim=-1)
    return numbers * wide[..., : numbers.shape[-1]]


def _spread(blocks: torch.Tensor, rows: int, columns: int, out: int, size: int) -> torch.Tensor:
    """One number per block -> one per weight, [..., out, size]."""
    columns = min(columns, size)
    wide = blocks[..., None].expand(*blocks.shape, columns).flatten(-2)[..., :size]
    return wide if rows == 1 else wide.repeat_interleave(min(rows, out), dim=-2)[..., :out, :]
