"""Scales as checkpoints store them: their types, and what stacked matrices make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from atom.model_ops.quant.base import Header
from atom.model_ops.quant.weights import Activations, ScaleType


def scale_dtype(header: Header | None) -> torch.dtype:
    """Of scales that are plain numbers: as in the checkpoint if of 16 bits, else float32.

    bfloat16 if the checkpoint is not known.
    """
    if header is None:
        return torch.bfloat16
    return header.dtype if header.dtype in (torch.float16, torch.bfloat16) else torch.float32


def scale_type(header: Header | None, stated: ScaleType = "float") -> ScaleType:
    """Of scales that may be exponents: as in the checkpoint, or `stated` if that is not known."""
    if header is None:
        return stated
    return "e8m0" if header.dtype in (torch.uint8, torch.float8_e8m0fnu) else "float"


def per_row(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """One number per stacked matrix, [..., matrices] -> one per output, [..., out]."""
    counts = torch.tensor(rows, device=values.device)
    return values.repeat_interleave(counts, dim=-1, output_size=sum(rows))


def largest(input_scales: torch.Tensor, how: Activations) -> torch.Tensor:
    """One static scale for all stacked matrices and experts: the largest clips no input.

    Stacked matrices read the same inputs, and calibration gives them the same scale. The down
    projections of experts do not, which costs a floating-point code nothing; 0 is the scale of an
    expert that calibration never chose.

    Raises:
        ValueError: for scales that are negative, not finite or all 0, and for integer codes whose
            scales differ so that the smallest lose a bit.
    """
    least, most = input_scales.amin(), input_scales.amax()
    if not input_scales.is_meta and not (least.item() >= 0 and 0 < most.item() < math.inf):
        raise ValueError(
            f"static scales of inputs from {least.item():g} to {most.item():g} must be positive "
            f"and finite"
        )
    if how.codes == "int8" and not input_scales.is_meta and 2 * least < most:
        raise ValueError(
            f"static scales of int8 inputs from {least.item():g} to {most.item():g} cannot be one"
        )
    return most
