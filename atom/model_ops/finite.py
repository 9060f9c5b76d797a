"""Checks that weights are finite."""

from __future__ import annotations

import math

import torch

_PART_SIZE = 1 << 24
_NAN_BITS = 0x7F  # of float8_e4m3fn, which has no infinity


def may_be_infinite(values: torch.Tensor) -> bool:
    """False if the sum is finite, and hence all values; one pass with little extra memory."""
    if values.dtype is torch.float8_e4m3fn:
        return any(bool(_is_nan(p).any()) for p in torch.split(values.flatten(), _PART_SIZE))
    return values.is_floating_point() and not math.isfinite(values.sum().item())


def check_finite(values: torch.Tensor) -> None:
    """Refuse NaN and infinity, which would make all outputs invalid.

    Raises:
        ValueError: with the number of such values.
    """
    if not may_be_infinite(values):
        return
    is_fp8 = values.dtype is torch.float8_e4m3fn
    bad = _is_nan(values) if is_fp8 else ~values.isfinite()
    if count := int(bad.sum()):
        raise ValueError(f"{count} of {values.numel()} values are NaN or infinite")


def _is_nan(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.uint8) & _NAN_BITS) == _NAN_BITS
