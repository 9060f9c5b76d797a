"""What modules of transformers are tried with, and how what they compute is compared."""

from __future__ import annotations

import torch
from torch import nn

# Of a try's tokens: what adds an epsilon shows in small numbers, what cuts off in large ones.
_FACTORS = (2.0**-10, 1.0, 2.0**12, 2.0**24)
# Tokens of a try.
LENGTH = len(_FACTORS)
# Of these tokens; some models scale by positions beyond thousands.
POSITIONS = (0, 1, 5, 20_000)


def numbers(*shape: int, phase: float = 0.0) -> torch.Tensor:
    """Between -1 and 1; others for another phase."""
    return (torch.arange(torch.Size(shape).numel()) + phase).sin().view(shape)


def rows(columns: int, phase: float = 0.0) -> torch.Tensor:
    """Rows of tokens of both signs and all sizes, [1, LENGTH, columns]."""
    return numbers(1, LENGTH, columns, phase=phase) * torch.tensor(_FACTORS)[:, None]


def is_same(found: object, expected: torch.Tensor) -> bool:
    """Whether numbers are equal, but for what rounding makes of the largest along the last axis."""
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    largest = expected.double().abs().amax(-1, keepdim=True)
    difference = (found.double() - expected.double()).abs()
    return bool((difference <= 2e-6 * largest).all())


def has_own_numbers(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers itself, not by a module in it."""
    return bool(module._parameters or module._buffers)
