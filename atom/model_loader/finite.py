"""Whether weights are numbers."""

from __future__ import annotations

import math

import torch


def check_finite(values: torch.Tensor) -> None:
    """Refuse what would end the engine's first step, or make every token the same.

    Raises:
        ValueError: with the number of values that are NaN or infinite.
    """
    # A sum takes one pass and no memory. Finite values may add up to infinity, so it only raises
    # suspicion.
    if not values.is_floating_point() or math.isfinite(values.sum().item()):
        return
    if count := int(values.numel() - values.isfinite().sum()):
        raise ValueError(f"{count} of {values.numel()} values are NaN or infinite")
