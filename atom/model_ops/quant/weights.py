"""Quantised weights as the ops get them, whatever the checkpoint's format.

    W[o, i] = (q[o, i] - z[o, i // columns]) * scale[o // rows, i // columns] * row_scale[o]

A format has the factors that it needs. Scales of a whole tensor are expanded to `row_scale`, so
that matrices with different ones can be stacked.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

import torch

Codes = Literal["int4", "int8", "fp8", "fp4"]
ScaleType = Literal["float", "e8m0", "e4m3"]

# e2m1: bit 3 is the sign.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# int4 codes are stored without a sign; this one stands for zero if there are no zero points.
INT4_ZERO = 8


@dataclass(frozen=True)
class Activations:
    """How the inputs of a product are quantised.

    Attributes:
        codes: `int8`, `fp8` (the device's e4m3) or `fp4`.
        group: inputs per scale; 0 for one scale per token.
        scale_type: `float`: amax / 127, 448 or 6. `e8m0`: for `fp8` the smallest power of two that
            is at least amax / 448; for `fp4` 2^(floor(log2(amax)) - 2), where an amax of 7/4 of a
            power of two or more counts as the next one, as Quark (`even`) and compressed-tensors
            round. `e4m3`: per group, times `QuantWeights.input_scale`.
        is_static: the scale is `QuantWeights.input_scale`, whatever the inputs.
    """

    codes: Literal["int8", "fp8", "fp4"]
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
        codes: `int4` and `fp4` are two to a byte.
        rows, columns: block of weights that shares one `scale`; 0, 0 without such scales.
        scale_type: `e8m0` bytes b are 2^(b - 127), `e4m3` is float8_e4m3fn.
        has_zeros: whether there are zero points (of integers).
        has_row_scale: whether there is one scale per output.
        activations: None if inputs are not quantised.
    """

    codes: Codes
    rows: int = 0
    columns: int = 0
    scale_type: ScaleType = "float"
    has_zeros: bool = False
    has_row_scale: bool = False
    activations: Activations | None = None

    def __post_init__(self) -> None:
        if self.has_zeros and not self.columns:
            raise ValueError("zero points belong to groups of inputs: `columns` is missing")

    @property
    def has_input_scale(self) -> bool:
        """Whether there is one scale of a product's inputs, which the checkpoint has."""
        how = self.activations
        return how is not None and (how.is_static or how.scale_type == "e4m3")

    def __str__(self) -> str:
        block = f" group {self.columns}" if self.rows == 1 else f" block {self.rows}x{self.columns}"
        parts = [self.codes + (block if self.columns else " channel")]
        if self.scale_type != "float":
            parts.append(self.scale_type)
        if self.has_zeros:
            parts.append("with zeros")
        parts.append("weight-only" if self.activations is None else f"x {self.activations}")
        return " ".join(parts)


@dataclass
class QuantWeights:
    """A matrix [out, in], or those of all experts with a leading dimension [experts].

    Attributes:
        codes: int8 or float8_e4m3fn [out, in]; int4 and fp4: uint8 [out, in / 2], element 2j in the
            low four bits of byte j. int4 codes are 0..15.
        scale: [ceil(out / rows), ceil(in / columns)], float16, bfloat16 or float32; uint8 for
            `e8m0`, float8_e4m3fn for `e4m3`.
        zeros: [out, ceil(in / columns)]: uint8 of 0..16 for int4, int8 for int8; float16 if they
            lie between codes.
        row_scale: float32 [out].
        input_scale: float32 [], for static and `e4m3` activation scales.
        column_order: int64 [in]; the product is of `x[..., column_order]` and these columns.
    """

    format: WeightFormat
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    column_order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """out, in of one matrix."""
        out, stored = self.codes.shape[-2:]
        return out, stored * (2 if self.format.codes in ("int4", "fp4") else 1)

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
        )


def dequantise(weights: QuantWeights, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The matrix [..., out, in], rounded once to `dtype`; columns in the order of the inputs.

    The products are computed in float32, or in float64 if that is asked for.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    values = _code_values(weights, wide)
    out, columns = weights.shape
    form = weights.format
    if weights.zeros is not None:
        values = values - _spread(weights.zeros.to(wide), 1, form.columns, out, columns)
    elif form.codes == "int4":
        values = values - INT4_ZERO
    if weights.scale is not None:
        scale = scale_values(weights.scale, form.scale_type, wide)
        values = values * _spread(scale, form.rows, form.columns, out, columns)
    if weights.row_scale is not None:
        values = values * weights.row_scale.to(wide)[..., None]
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
    if isinstance(prepared, torch.Tensor):
        return prepared.nbytes
    if isinstance(prepared, tuple):
        return sum(held_bytes(item) for item in prepared)
    if is_dataclass(prepared) and not isinstance(prepared, type):
        return sum(held_bytes(getattr(prepared, item.name)) for item in fields(prepared))
    return 0


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> uint8 [..., 2n], the low four bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2n] of values 0..15 -> uint8 [..., n], the low four bits first."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _code_values(weights: QuantWeights, dtype: torch.dtype) -> torch.Tensor:
    codes = weights.codes
    if weights.format.codes == "int4":
        return unpack_nibbles(codes).to(dtype)
    if weights.format.codes == "fp4":
        positive = torch.tensor(FP4_VALUES, dtype=dtype, device=codes.device)
        return torch.cat((positive, -positive))[unpack_nibbles(codes).long()]
    return codes.to(dtype)


def _spread(blocks: torch.Tensor, rows: int, columns: int, out: int, size: int) -> torch.Tensor:
    """One number per block -> one per weight, [..., out, size]."""
    wide = blocks.repeat_interleave(min(columns, size), dim=-1)[..., :size]
    return wide if rows == 1 else wide.repeat_interleave(min(rows, out), dim=-2)[..., :out, :]
