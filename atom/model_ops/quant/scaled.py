"""Formats that store one code, or two to a byte, with scales beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atom.model_ops.quant.base import IN, OUT, Axis, QuantMethod, StoredTensor
from atom.model_ops.quant.scales import largest, per_row
from atom.model_ops.quant.weights import QuantWeights, WeightFormat

_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp4": torch.uint8}
_SCALAR = StoredTensor((), torch.float32, "numbers")
_PER_OUTPUT = StoredTensor((OUT,), torch.float32, "numbers")


@dataclass(frozen=True)
class ScaleNames:
    """Attributes:
    codes: the matrix' tensor.
    scale: of a block, of an output or of the whole matrix.
    factor: a second scale, of the whole matrix; None without one.
    inputs: the scale of inputs, if the format has one.
    are_divisors: `factor` and `inputs` hold reciprocals.
    """

    codes: str = "weight"
    scale: str = "weight_scale"
    factor: str | None = None
    inputs: str = "input_scale"
    are_divisors: bool = False


class ScaledMethod(QuantMethod):
    """The scale has one number per block of the format; without blocks, one per output [out, 1] or
    for the whole matrix.

    Args:
        dtype: of scales of blocks that are plain numbers.
    """

    def __init__(
        self,
        form: WeightFormat,
        names: ScaleNames = ScaleNames(),
        is_per_output: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.format = form
        self._names = names
        self._is_per_output = is_per_output
        inputs = Axis("in", 2) if form.codes == "fp4" else IN
        stored = {
            names.codes: StoredTensor((OUT, inputs), _CODES[form.codes]),
            names.scale: self._scale(form, dtype),
        }
        if names.factor is not None:
            stored[names.factor] = _SCALAR
        if form.has_input_scale:
            stored[names.inputs] = _SCALAR
        self.stored = stored

    def _scale(self, form: WeightFormat, dtype: torch.dtype) -> StoredTensor:
        if not form.columns:
            return _PER_OUTPUT if self._is_per_output else _SCALAR
        blocks = Axis("out", form.rows), Axis("in", form.columns)
        if form.scale_type == "e8m0":
            return StoredTensor(blocks, torch.uint8, "exponents")
        if form.scale_type == "e4m3":
            return StoredTensor(blocks, torch.float8_e4m3fn)
        return StoredTensor(blocks, dtype, "numbers")

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        names = self._names
        scale = tensors[names.scale]
        row_scale = None
        if not self.format.columns:
            row_scale = scale if self._is_per_output else per_row(scale, rows)
        elif names.factor is not None:
            row_scale = per_row(self._factor(names.factor, tensors[names.factor]), rows)
        input_scale = None
        how = self.format.activations
        if how is not None and names.inputs in tensors:
            input_scale = largest(self._factor(names.inputs, tensors[names.inputs]), how)
        return QuantWeights(
            self.format,
            tensors[names.codes],
            scale if self.format.columns else None,
            row_scale=row_scale,
            input_scale=input_scale,
        )

    def _factor(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if not self._names.are_divisors:
            return values
        if bool((values == 0).any()):
            raise ValueError(f"{name} divides, and is 0")
        return values.reciprocal()
