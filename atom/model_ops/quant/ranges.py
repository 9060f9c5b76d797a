"""Checks that the numbers that quantised weights stand for are finite in the model's dtype."""

from __future__ import annotations

import torch

from atom.model_ops.finite import may_be_infinite
from atom.model_ops.quant.weights import QuantWeights, ScaleType, dequantise, scale_values

_PART_SIZE = 1 << 24
# Of a code, less the middle for int4 and int6.
_LARGEST_CODES = {"int4": 15, "int6": 63, "int8": 128, "fp4": 6, "fp8": 448}


def check_range(weights: QuantWeights, dtype: torch.dtype) -> None:
    """Refuse weights that are NaN or infinite as `dtype`.

    Reads the scales alone, unless codes as large as can be would not fit with the largest of them.

    Raises:
        ValueError: with the largest weight.
    """
    if weights.codes.is_meta or _bound(weights) <= torch.finfo(dtype).max:
        return
    if weights.codes.dim() == 2:
        _check_matrix(weights, dtype)
        return
    for expert in range(weights.codes.shape[0]):
        _check_matrix(weights.experts(expert, expert + 1), dtype)


def _bound(weights: QuantWeights) -> float:
    """At least the largest weight; NaN or infinity if a scale is."""
    bound: float = _LARGEST_CODES[weights.format.codes]
    if weights.zeros is not None:
        bound += _largest(weights.zeros)
    if weights.scale is not None:
        bound *= _largest(weights.scale, weights.format.scale_type)
    if weights.row_scale is not None:
        bound *= _largest(weights.row_scale)
    if weights.super_scale is not None:
        bound *= _largest(weights.super_scale)
    if weights.offset is not None:
        offset = _largest(weights.offset)
        bound += offset * (1 if weights.super_offset is None else _largest(weights.super_offset))
    return bound


def _largest(values: torch.Tensor, scale_type: ScaleType = "float") -> float:
    """The largest magnitude."""
    parts = torch.split(values.flatten(), _PART_SIZE)
    return (
        torch.stack([scale_values(part, scale_type).abs().amax() for part in parts]).amax().item()
    )


def _check_matrix(weights: QuantWeights, dtype: torch.dtype) -> None:
    values = dequantise(weights, dtype)
    if not may_be_infinite(values) or bool(values.isfinite().all()):
        return
    most = dequantise(weights, torch.float64).abs().amax().item()
    raise ValueError(f"weights up to {most:g} do not fit {str(dtype).removeprefix('torch.')}")
