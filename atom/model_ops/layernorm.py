"""RMS norm, with the residual addition that usually precedes it."""

from __future__ import annotations

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, computed in float32."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size)
        self.eps = eps
        self._norm = context.ops.resolve("rms_norm", context.dtype, size=size)
        self._add_norm = context.ops.resolve("add_rms_norm", context.dtype, size=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        out: torch.Tensor = self._norm(x, self.weight, self.eps)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(x + residual), x + residual)`."""
        out: tuple[torch.Tensor, torch.Tensor] = self._add_norm(x, residual, self.weight, self.eps)
        return out
