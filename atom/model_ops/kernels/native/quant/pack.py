"""Quantised weights in the layout that the kernels stream: see `csrc/quant/codes.h`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from atom.model_ops.kernels.native.bindings import Kernels, constant, num_threads
from atom.model_ops.kernels.native.huge_pages import empty_stream
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.model_ops.registry import OpQuery

BITS = {"int4": 4, "int6": 6, "int8": 8}
# `Number` in csrc/quant/matrix.h.
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
# Inputs in the smallest piece of a matrix.
_UNITS = {"int4": 32, "int6": 16, "int8": 32}
_TILE = 64
# `Inputs` and `kMostWide` in csrc/quant/matrix.h.
_INPUTS = {"int8": 1, "int16": 2, "int12": 4}
_PLAIN_INPUTS, _BFLOAT16_INPUTS = 0, 3
_UNIT_INPUTS = 32
_MOST_WIDE = 1024
# Sums of products of codes stay within 32 bits.
_MOST_INPUTS = 1 << 16
_pack = Kernels("quant_pack", "2P6q")


@dataclass(frozen=True)
class PackedWeights:
    """Quantised weights [out_features, in_features] in panels of `lanes` outputs; those of all
    experts with a leading dimension.

    Attributes:
        codes: uint8 [panels, bytes].
        scale: [panels, groups, lanes]; of what a row has one of, a group is all inputs.
        shift: zero points (float16) or offsets, as `scale`; None without them.
        super_scale, super_offset: float16 [panels, super groups, lanes], or None.
        order: int32 [in_features]: which input is multiplied with each column; None for its own.
        sizes: what the kernels are told of them, in the order of `QuantLinearArgs`: in_features,
            inputs (filled up with zeros), out_features, bits, the code of zero, inputs per group
            and super group, dtypes of scale and shift, whether shifts are offsets, inputs that
            share all scales, what inputs become, inputs per scale of theirs.
        fixed_scale: of all inputs; 0 where scales are computed.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor | None
    super_scale: torch.Tensor | None
    super_offset: torch.Tensor | None
    order: torch.Tensor | None
    sizes: tuple[int, ...]
    fixed_scale: float

    def addresses(self) -> tuple[int, ...]:
        """Of the tensors, in their order; 0 for those that there are not."""
        tensors = self.scale, self.shift, self.super_scale, self.super_offset, self.order
        return self.codes.data_ptr(), *(0 if t is None else t.data_ptr() for t in tensors)

    def of_rows(self, rows: slice) -> PackedWeights | None:
        """The same weights of outputs `rows`, without copies; None if these are not whole pairs of
        panels.
        """
        lanes, outs = self.scale.shape[-1], self.out_features
        if rows.start % (2 * lanes) or (rows.stop % (2 * lanes) and rows.stop != outs):
            return None
        panels = slice(rows.start // lanes, -(-rows.stop // lanes))

        def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[panels]

        size, inputs, _, *others = self.sizes
        return replace(
            self,
            codes=self.codes[panels],
            scale=self.scale[panels],
            shift=of(self.shift),
            super_scale=of(self.super_scale),
            super_offset=of(self.super_offset),
            sizes=(size, inputs, rows.stop - rows.start, *others),
        )

    @property
    def takes_bfloat16(self) -> bool:
        """Whether inputs are bfloat16 and nothing else."""
        return self.sizes[11] == _BFLOAT16_INPUTS

    @property
    def in_features(self) -> int:
        return self.sizes[0]

    @property
    def out_features(self) -> int:
        return self.sizes[2]


def refuses(query: OpQuery) -> str | None:
    """Why weights of this format cannot be multiplied packed; None if they can."""
    return refuses_inputs(query.weights, query.shape["in_features"])


def refuses_inputs(form: WeightFormat | None, size: int) -> str | None:
    """The same of weights with so many inputs."""
    assert form is not None
    if form.codes not in BITS or form.scale_type not in ("float", "int8"):
        return f"reads int4, int6 and int8 with plain scales, not {form}"
    if form.columns and form.has_row_scale:
        return f"reads scales of groups or of rows, not both: {form}"
    if size > _MOST_INPUTS:
        return f"in_features={size} is more than {_MOST_INPUTS}"
    if reason := _refuses_inputs(form):
        return reason
    unit = _UNITS[form.codes]
    sizes = {"weights": form.columns, "inputs": _input_group(form.activations)}
    for of, group in sizes.items():
        if group < size and (group % unit or (group > unit and group % _TILE and group != 32)):
            return f"{form.codes} {of} in groups of {group}, not {unit} or a multiple of {_TILE}"
    smaller, larger = sorted(group or size for group in sizes.values())
    if smaller < size and larger < size and larger % smaller:
        return f"weights in groups of {form.columns}, inputs of {sizes['inputs']}"
    if not constant("has_float16") and (form.has_zeros or form.super_columns):
        return "built without float16 conversion"
    return None


def _refuses_inputs(form: WeightFormat) -> str | None:
    how = form.activations
    if how is None or (how.codes == "int8" and how.scale_type == "float"):
        return None
    wide = Activations("int12" if form.codes == "int4" else "int16")
    return None if how == wide else f"inputs become int8, {wide} or stay as they are, not {how}"


def _input_group(how: Activations | None) -> int:
    return 0 if how is None else how.group


def takes_tiles(columns: int, dtype: torch.dtype) -> bool:
    """Whether so many inputs of `dtype` that are not rounded are multiplied on matrix tiles of
    bfloat16, which the weights become meanwhile: see `csrc/quant/unpack.h`.
    """
    is_whole = columns % _UNIT_INPUTS == 0
    return dtype is torch.bfloat16 and is_whole and bool(constant("has_tiles"))


def _input_kind(form: WeightFormat, columns: int, dtype: torch.dtype) -> int:
    if form.activations is not None:
        return _INPUTS[form.activations.codes]
    return _BFLOAT16_INPUTS if takes_tiles(columns, dtype) else _PLAIN_INPUTS


def prepare(weights: QuantWeights, dtype: torch.dtype) -> PackedWeights:
    """Pack a matrix, or those of all experts; none of its numbers changes.

    Args:
        dtype: of the inputs; those of weights packed for float32 may have any.

    Raises:
        ValueError: when groups of inputs share scales and the columns are in another order.
    """
    form = weights.format
    if weights.column_order is not None and _input_group(form.activations):
        raise ValueError(f"inputs in the order of their groups are none in that of columns: {form}")
    out, columns = weights.shape
    group = min(form.columns or columns, columns)
    how = form.activations
    input_group = min(how.group or columns, columns) if how is not None else columns
    span = min(group, input_group)
    most = _MOST_WIDE if how is not None and how.codes == "int16" else _MOST_INPUTS
    if span == columns:
        span = math.ceil(columns / math.ceil(columns / most) / _TILE) * _TILE
    elif span > most:  # of whole tiles, as every large group
        span = max(part for part in range(_TILE, most + 1, _TILE) if span % part == 0)
    inputs = math.ceil(columns / span) * span
    shift = weights.zeros.half() if weights.zeros is not None else weights.offset
    scale = _per_output(weights)
    order = weights.column_order
    middle = 128 if form.codes == "int8" else 0 if form.has_zeros else form.zero
    kind = _input_kind(form, columns, dtype)
    sizes = (
        *(columns, inputs, out, BITS[form.codes], middle),
        *(inputs if group == columns else group, form.super_columns),
        *(_NUMBERS[scale.dtype], 0 if shift is None else _NUMBERS[shift.dtype]),
        *(form.has_offsets, span, kind),
        inputs if input_group == columns else input_group,
    )
    fixed = how is not None and how.is_static and weights.input_scale is not None
    return PackedWeights(
        _pack_codes(weights, inputs, kind == _BFLOAT16_INPUTS),
        _in_panels(scale),
        None if shift is None else _in_panels(shift),
        None if weights.super_scale is None else _in_panels(weights.super_scale),
        None if weights.super_offset is None else _in_panels(weights.super_offset),
        None if order is None else order.to(torch.int32),
        sizes,
        weights.input_scale.item() if fixed and weights.input_scale is not None else 0.0,
    )


def _per_output(weights: QuantWeights) -> torch.Tensor:
    """Scales of outputs, or of blocks of them -> of each, [..., out, groups]."""
    if weights.scale is None:
        assert weights.row_scale is not None
        return weights.row_scale[..., None]
    rows = min(weights.format.rows, weights.shape[0])
    return weights.scale.repeat_interleave(rows, dim=-2)[..., : weights.shape[0], :]


def _in_panels(values: torch.Tensor) -> torch.Tensor:
    """[..., out, n] -> [..., panels, n, lanes]; outputs that there are not are 0."""
    lanes = constant("lanes")
    out, count = values.shape[-2:]
    padded = torch.nn.functional.pad(values, (0, 0, 0, -out % lanes))
    panels = padded.view(*values.shape[:-2], -1, lanes, count).transpose(-1, -2)
    return empty_stream(panels.shape, panels.dtype).copy_(panels)


def _pack_codes(weights: QuantWeights, inputs: int, in_units: bool) -> torch.Tensor:
    """-> uint8 [..., panels, bytes]."""
    bits, lanes = BITS[weights.format.codes], constant("lanes")
    codes = weights.codes.contiguous()
    out, columns = weights.shape
    matrices = codes.shape[:-2]
    panels = math.ceil(out / lanes), lanes * inputs * bits // 8
    packed = empty_stream((*matrices, *panels), torch.uint8)
    sources, targets = codes.view(-1, *codes.shape[-2:]), packed.view(-1, *packed.shape[-2:])
    for source, target in zip(sources, targets, strict=True):
        pointers = source.data_ptr(), target.data_ptr()
        _pack(None, *pointers, out, columns, inputs, bits, in_units, num_threads())
    return packed
