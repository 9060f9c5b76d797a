"""Checks that weights are finite."""

from __future__ import annotations

import math

import torch


def may_be_infinite(values: torch.Tensor) -> bool:
    """False if the sum is finite, and hence all values; one pass without extra memory."""
    return values.is_floating_point() and not math.isfinite(values.sum().item())


def check_finite(values: torch.Tensor) -> None:
    """Refuse NaN and infinity, which would make all outputs invalid.

    Raises:
        ValueError: with the number of such values.
    """
    if not may_be_infinite(values):
        return
    if count := int(values.numel() - values.isfinite().sum()):
        raise ValueError(f"{count} of {values.numel()} values are NaN or infinite")
