"""Gated activations."""

from __future__ import annotations

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext


class GeluAndMul(nn.Module):
    """[T, 2 * d], gate then up -> gelu(gate) * up, [T, d], with gelu's approximation by tanh."""

    def __init__(self, size: int, context: LayerContext) -> None:
        super().__init__()
        self._op = context.ops.resolve("gelu_and_mul", context.dtype, size=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._op(x)
        return out


class SiluAndMul(nn.Module):
    """[T, 2 * d], gate then up -> silu(gate) * up, [T, d]."""

    def __init__(self, size: int, context: LayerContext) -> None:
        super().__init__()
        self._op = context.ops.resolve("silu_and_mul", context.dtype, size=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._op(x)
        return out
