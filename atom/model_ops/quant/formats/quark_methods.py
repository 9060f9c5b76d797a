"""How Quark stores weights: the tensors of each scheme.

Source: AMD Quark's exporter and AMD's published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from atom.config import ConfigError
from atom.model_ops.quant.base import (
    IN,
    OUT,
    Axis,
    Header,
    QuantMethod,
    StoredTensor,
)
from atom.model_ops.quant.formats.quark_specs import LayerSpecs, Spec, read_activations
from atom.model_ops.quant.names import find_header
from atom.model_ops.quant.scaled import ScaledMethod, ScaleNames
from atom.model_ops.quant.scales import largest, per_row, scale_dtype, scale_type
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.model_ops.quant.words import (
    PER_WORD,
    check_no_zeros,
    repack_words,
    transpose_words,
    unpack_words,
)

_SCALAR = StoredTensor((), torch.float32, "numbers")
_PER_OUTPUT = StoredTensor((OUT,), torch.float32, "numbers")
# Two's complement to offset binary, one code or two to a byte.
_SIGN_BIT, _SIGN_BITS = 0x8, 0x88


def create_method(
    specs: LayerSpecs,
    headers: Mapping[str, Header],
    prefix: str,
    parts: Sequence[str],
    is_reordered: bool,
) -> QuantMethod:
    """The method of a layer, or of the stacked `parts`.

    Args:
        headers: of the checkpoint's tensors.
        is_reordered: codes in words are in AWQ's order.

    Raises:
        ConfigError: when there is none for these specs.
    """
    activations, input_scale = read_activations(specs.inputs)
    first = specs.weight[0]
    names = ScaleNames(inputs=input_scale or "input_scale")

    def header(tensor: str) -> Header | None:
        return find_header(headers, prefix, parts, tensor)

    match [(spec.dtype, spec.qscheme) for spec in specs.weight]:
        case [("fp4", "per_group")] if first.has_exponents and first.group_size == 32:
            return ScaledMethod(WeightFormat("fp4", 1, 32, "e8m0", activations=activations), names)
        case [("fp4", "per_group"), ("fp8_e4m3", "per_tensor")] if first.group_size == 16:
            form = WeightFormat("fp4", 1, 16, "e4m3", False, True, activations)
            return ScaledMethod(form, replace(names, factor="weight_scale_2"))
        case [("fp8_e4m3", "per_tensor" | "per_channel" | "per_block")]:
            form = _fp8_format(first, activations, header("weight_scale"))
            return ScaledMethod(form, names, first.qscheme == "per_channel")
        case [("int4" | "uint4", "per_group")] if first.group_size > 0:
            return Int4GroupMethod(first, activations, input_scale, is_reordered, header)
        case [*stages, ("int4", "per_channel")] if specs.weight[-1].symmetric and (
            stages in ([], [("fp8_e4m3", "per_tensor")])
        ):
            scales = _channel_scales(header, prefix, len(specs.weight))
            return Int4ChannelMethod(scales, activations, input_scale, is_reordered)
    raise ConfigError(f"quantization_config: {prefix} is stored as {specs}, which is not supported")


class _IntegerMethod(QuantMethod):
    """int4 in words of 32 bits."""

    def __init__(
        self,
        form: WeightFormat,
        stored: Mapping[str, StoredTensor],
        activations: Activations | None,
        input_scale: str | None,
    ) -> None:
        self.format = replace(form, activations=activations)
        self.stored = stored if input_scale is None else {**stored, input_scale: _SCALAR}
        self._input_scale = input_scale

    def input_scale(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        how = self.format.activations
        if how is None or self._input_scale is None:
            return None
        return largest(tensors[self._input_scale], how)


def _fp8_format(spec: Spec, activations: Activations | None, scale: Header | None) -> WeightFormat:
    if spec.qscheme != "per_block":
        return WeightFormat("fp8", has_row_scale=True, activations=activations)
    if len(spec.block_size) != 2:
        raise ConfigError(f"quantization_config: block_size={list(spec.block_size)}")
    kind = scale_type(scale, "e8m0" if spec.has_exponents else "float")
    return WeightFormat("fp8", *spec.block_size, kind, activations=activations)


class Int4GroupMethod(_IntegerMethod):
    """Transposed: `weight` int32 [in, out / 8], `weight_scale` [in / group_size, out] and
    `weight_zero_point` int32 [in / group_size, out / 8].

    int4 codes and zero points are two's complements; those of symmetric weights must be 0.
    """

    def __init__(
        self,
        spec: Spec,
        activations: Activations | None,
        input_scale: str | None,
        is_reordered: bool,
        header: Callable[[str], Header | None],
    ) -> None:
        self._is_signed = spec.dtype == "int4"
        self._has_zeros = not (self._is_signed and spec.symmetric)
        self._is_reordered = is_reordered
        groups, words = Axis("in", spec.group_size), Axis("out", PER_WORD)
        scale = header("weight_scale")
        stored = {
            "weight": StoredTensor((IN, words), torch.int32),
            "weight_scale": StoredTensor((groups, OUT), scale_dtype(scale), "numbers"),
            "weight_zero_point": StoredTensor(
                (groups, words), torch.int32, is_optional=not self._has_zeros
            ),
        }
        form = WeightFormat("int4", 1, spec.group_size, has_zeros=self._has_zeros)
        super().__init__(form, stored, activations, input_scale)

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        codes = transpose_words(tensors["weight"], self._is_reordered)
        zeros = unpack_words(tensors["weight_zero_point"], self._is_reordered).mT
        if not self._has_zeros:
            check_no_zeros(zeros)
        if self._is_signed:
            codes, zeros = codes ^ _SIGN_BITS, zeros ^ _SIGN_BIT
        return QuantWeights(
            self.format,
            codes,
            tensors["weight_scale"].mT.contiguous(),
            zeros.contiguous() if self._has_zeros else None,
            input_scale=self.input_scale(tensors),
        )


class Int4ChannelMethod(_IntegerMethod):
    """`weight` int32 [out, in / 8] of two's complements, times all `scales`.

    With two stages, `weight_scale` of the matrix makes it FP8, `weight_scale_2` [out] the FP8
    numbers int4.
    """

    def __init__(
        self,
        scales: Mapping[str, StoredTensor],
        activations: Activations | None,
        input_scale: str | None,
        is_reordered: bool,
    ) -> None:
        self._scales = scales
        self._is_reordered = is_reordered
        stored = {
            "weight": StoredTensor((OUT, Axis("in", PER_WORD)), torch.int32),
            **scales,
            # Checked when it is read, whatever its shape.
            "weight_zero_point": StoredTensor((), torch.int32, is_optional=True),
        }
        super().__init__(WeightFormat("int4", has_row_scale=True), stored, activations, input_scale)

    def read(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if name != "weight_zero_point":
            return {name: tensor}
        if not tensor.is_meta:
            check_no_zeros(tensor)
        return {}

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        factors = [
            tensors[name] if stored is _PER_OUTPUT else per_row(tensors[name], rows)
            for name, stored in self._scales.items()
        ]
        codes = repack_words(tensors["weight"], self._is_reordered) ^ _SIGN_BITS
        return QuantWeights(
            self.format,
            codes,
            row_scale=math.prod(factors[1:], start=factors[0]),
            input_scale=self.input_scale(tensors),
        )


def _channel_scales(
    header: Callable[[str], Header | None], prefix: str, num_stages: int
) -> dict[str, StoredTensor]:
    """The scales that the checkpoint has, of the matrix or per output; else those of the stages.

    Raises:
        ConfigError: with their shapes, when they are neither.
    """
    found = {name: header(name) for name in ("weight_scale", "weight_scale_2")}
    shapes = {name: list(held.shape) for name, held in found.items() if held is not None}
    sizes = {name: sum(size != 1 for size in shape) for name, shape in shapes.items()}
    if any(count > 1 for count in sizes.values()):
        raise ConfigError(
            f"{prefix} has int4 weights with scales of shape {shapes}; supported are one number "
            f"per output, per matrix, or both"
        )
    if sizes:
        return {name: _PER_OUTPUT if count else _SCALAR for name, count in sizes.items()}
    if num_stages == 1:
        return {"weight_scale": _PER_OUTPUT}
    return {"weight_scale": _SCALAR, "weight_scale_2": _PER_OUTPUT}
