"""Whether weights are numbers."""

from __future__ import annotations

import math

import torch


def may_be_infinite(values: torch.Tensor) -> bool:
    """False for a tensor of finite numbers whose sum is finite, in one pass and without memory."""
    return values.is_floating_point() and not math.isfinite(values.sum().item())


def check_finite(values: torch.Tensor) -> None:
    """Refuse what would end the engine's first step, or make every token the same.

    Raises:
        ValueError: with the number of values that are NaN or infinite.
    """
    if not may_be_infinite(values):
        return
    if count := int(values.numel() - values.isfinite().sum()):
        raise ValueError(f"{count} of {values.numel()} values are NaN or infinite")
