"""Quantised weights in the layout that the tiles of `quant_tiles` are read from.

Codes of four bits: uint8 [out, inputs / 2]. Each span of `SPAN` inputs takes SPAN / 2 bytes; byte j
of it has input j in the low four bits and input j + SPAN / 2 in the high four: one load gives two
tiles of adjacent inputs, without a shuffle. Scales and zero points are transposed, [groups, out]:
a tile's rows are adjacent. Inputs are padded with zero bytes to whole spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from atom.model_ops.quant.rounding import Form, InputRounding
from atom.model_ops.quant.weights import QuantWeights, WeightFormat
from atom.model_ops.registry import OpQuery
from atom.platform import Platform

PART = 64  # inputs per product of tiles
SPAN = 2 * PART  # inputs whose four-bit codes share bytes
_NIBBLES = ("int4", "fp4")
_MOST_BYTES = 1 << 31

Way = Literal["numbers", "codes", "mx"]


@dataclass
class TileWeights:
    """A matrix, or those of all experts with a leading dimension, ready for the kernels.

    Attributes:
        format: of the checkpoint; its activations say how inputs are quantised.
        way: how they are multiplied; see `choose_way`.
        inputs: columns of the matrix without padding.
        codes: [out, padded inputs] of eight bits; uint8 [out, padded inputs / 2] of four bits, in
            the layout above, or for `mx` as they were.
        scale: [groups, ceil(out / rows)]; dtypes as in `QuantWeights`.
        zeros: [groups, out].
        row_scale: float32 [out]; multiplies the sums, not the weights.
        input_scale: float32 [].
        column_order: int64 [inputs]; the product is of `x[..., column_order]`.
        fp8: type of inputs that are quantised to `fp8`.
        plain: [out, inputs] of the model's type: of one more expert, behind the last, which is not
            quantised; None if there is none.
    """

    format: WeightFormat
    way: Way
    inputs: int
    codes: torch.Tensor
    scale: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scale: torch.Tensor | None
    input_scale: torch.Tensor | None
    column_order: torch.Tensor | None
    fp8: torch.dtype
    plain: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """With the one that is not quantised."""
        return self.codes.shape[0] + (self.plain is not None)

    @property
    def rows(self) -> int:
        return self.codes.shape[-2]

    @property
    def block_k(self) -> int:
        """Inputs per iteration of the kernels."""
        return PART if self.way == "numbers" and self.format.codes not in _NIBBLES else SPAN

    @property
    def input_rounding(self) -> InputRounding | None:
        """Of inputs in the order of the weights' columns; None if they are not quantised."""
        how = self.format.activations
        if how is None:
            return None
        if self.way != "numbers":
            return InputRounding(how, self.input_scale, self.fp8, "codes", SPAN)
        form: Form = "products" if how.group else "numbers"
        return InputRounding(how, self.input_scale, self.fp8, form)

    @property
    def rounding(self) -> InputRounding | None:
        """Of inputs in their own order, if they are quantised in it: a norm may do it."""
        return None if self.column_order is not None else self.input_rounding

    def constants(self) -> dict[str, object]:
        """The constexpr arguments of `quant_product` that the weights decide."""
        form = self.format
        columns = form.columns
        if columns >= self.inputs:  # one group, whatever its size
            columns = -(-columns // SPAN) * SPAN
        return {
            "CODES": form.codes,
            "ROWS": form.rows,
            "COLUMNS": columns,
            "SCALE_TYPE": form.scale_type,
            "HAS_ZEROS": form.has_zeros,
            "WAY": self.way,
            "WHOLE_K": self.inputs % self.block_k == 0,
            "BLOCK_K": self.block_k,
        }


def choose_way(form: WeightFormat, platform: Platform) -> tuple[Way, str]:
    """How weights and inputs are multiplied, and why inputs are quantised in vain, or "".

    numbers: weights are dequantised to the inputs' type; quantised inputs are rounded in it.
    codes: codes are multiplied, integers or FP8, and products of `SPAN` inputs scaled.
    mx: MXFP4 codes are multiplied with their scales.
    """
    how = form.activations
    if how is None:
        return "numbers", ""
    mxfp4 = ("fp4", 32, "e8m0")
    stored = (form.codes, form.columns, form.scale_type)
    if form.rows == 1 and stored == (how.codes, how.group, how.scale_type) == mxfp4:
        if platform.arch == "gfx950":
            return "mx", ""
        return "numbers", "these kernels multiply fp4 codes on gfx950 only"
    if how.codes == "fp4" or form.codes == "fp4":
        return "numbers", f"no product of {form} in codes"
    if form.codes not in ("int4", how.codes) or form.has_zeros:
        return "numbers", f"no product of {form.codes} and {how.codes} codes" + (
            " with zero points" if form.has_zeros else ""
        )
    for name, group in (("weights", form.columns), ("inputs", how.group)):
        if group % SPAN:
            return "numbers", f"{name} have scales of {group} inputs, products of codes {SPAN}"
    return "codes", ""


def note(query: OpQuery) -> str:
    """Why quantised inputs gain nothing, or ""."""
    if query.weights is None:
        return ""
    _, reason = choose_way(query.weights, query.platform)
    dtype = str(query.dtype).removeprefix("torch.")
    return reason and f"inputs are rounded, but multiplied as {dtype}: {reason}"


def refuses_tiles(
    form: WeightFormat, rows: int | None, inputs: int | None, platform: Platform
) -> str | None:
    """Why no tile of these weights can be read, or None."""
    if form.has_offsets or form.super_columns or form.codes == "int6":
        return f"kernels do not read {form}: int6 codes, offsets, or scales that have scales"
    whole = inputs is not None and form.columns >= inputs
    aligned = form.columns % PART == 0 or (form.columns >= 16 and PART % form.columns == 0)
    if form.columns and not whole and not aligned:
        return f"groups of {form.columns} inputs; kernels take 16, 32 and multiples of {PART}"
    if form.has_zeros and not form.columns:
        return "zero points without groups of inputs"
    if form.has_zeros and form.rows != 1:
        return f"zero points with blocks of {form.rows} rows; kernels take one row"
    how = form.activations
    fp8_codes = form.codes == "fp8" or (how is not None and how.codes == "fp8")
    fp8_scales = "e4m3" in (form.scale_type, how.scale_type if how is not None else "")
    old = platform.kind == "cuda" and int(platform.arch.removeprefix("sm")) < 89
    if old and (fp8_codes or fp8_scales):
        return f"{platform.arch} does not convert float8_e4m3fn"
    if rows is not None and inputs is not None:
        stored = rows * (-(-inputs // SPAN) * SPAN) // (2 if form.codes in _NIBBLES else 1)
        if stored >= _MOST_BYTES:
            return f"{stored} bytes of codes; kernels reach less than {_MOST_BYTES}"
    return None


def prepare_tiles(weights: QuantWeights, platform: Platform) -> TileWeights:
    """The layout above; FP8 becomes the platform's type.

    Raises:
        ValueError: when inputs are reordered whose groups are quantised.
    """
    form, how = weights.format, weights.format.activations
    if weights.column_order is not None and how is not None and how.group:
        raise ValueError(f"{form}: inputs that are quantised in groups cannot be reordered")
    if platform.fp8_dtype is torch.float8_e4m3fnuz:
        weights = to_fnuz(weights)
    way, _ = choose_way(form, platform)
    _, inputs = weights.shape
    codes = _pad(weights.codes, -inputs % SPAN, form)
    if form.codes in _NIBBLES and way != "mx":
        codes = _matrix_by_matrix(codes, split_halves)
    return TileWeights(
        form,
        way,
        inputs,
        codes.contiguous(),
        _transposed(weights.scale),
        _transposed(weights.zeros),
        weights.row_scale,
        weights.input_scale,
        weights.column_order,
        platform.fp8_dtype,
    )


def split_halves(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n / 2] with neighbours in a byte -> inputs j and j + SPAN / 2 of each span."""
    spans = packed.reshape(*packed.shape[:-1], -1, SPAN // 2)
    first, second = spans[..., : SPAN // 4], spans[..., SPAN // 4 :]
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    return torch.stack((even, odd), dim=-1).flatten(-3)


def to_fnuz(weights: QuantWeights) -> QuantWeights:
    """FP8 weights and static scales in float8_e4m3fnuz, of which the same bits mean half."""
    how, codes, rows = weights.format.activations, weights.codes, weights.row_scale
    input_scale = weights.input_scale
    if how is not None and how.codes == "fp8" and input_scale is not None:
        input_scale = 2 * input_scale
    if weights.format.codes == "fp8":
        # 0x80 is NaN there, not -0.
        bits = _matrix_by_matrix(codes.view(torch.uint8), lambda b: b.masked_fill(b == 0x80, 0))
        codes = bits.view(torch.float8_e4m3fnuz)
        rows = 2 * (torch.ones(codes.shape[:-1], device=codes.device) if rows is None else rows)
    return replace(weights, codes=codes, row_scale=rows, input_scale=input_scale)


def _matrix_by_matrix(
    codes: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`change` of codes [out, in] or [experts, out, in], with the temporaries of one matrix."""
    if codes.dim() == 2:
        return change(codes)
    out = torch.empty_like(codes)
    for expert in range(codes.shape[0]):
        out[expert] = change(codes[expert])
    return out


def _pad(codes: torch.Tensor, inputs: int, form: WeightFormat) -> torch.Tensor:
    if not inputs:
        return codes
    extra = inputs // 2 if form.codes in _NIBBLES else inputs
    padded = torch.nn.functional.pad(codes.view(torch.uint8), (0, extra))
    return padded.view(codes.dtype)


def _transposed(blocks: torch.Tensor | None) -> torch.Tensor | None:
    if blocks is None:
        return None
    bits = blocks.view(torch.uint8) if blocks.element_size() == 1 else blocks
    return bits.transpose(-1, -2).contiguous().view(blocks.dtype)
