"""RMS norm, with the sum that usually precedes it: over the ranks, and with a residual."""

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        out: torch.Tensor = self._norm(x, self.weight, self.eps)
        return out


class RMSNormPair:
    """Two norms of parts of the same rows; their weights are those of the layers' own."""

    def __init__(self, first: RMSNorm, second: RMSNorm, context: LayerContext) -> None:
        self._layers = first, second
        size = max(len(first.weight), len(second.weight))
        self._norm = context.ops.resolve("rms_norm", context.dtype, size=size)
        self._pair = context.ops.resolve("rms_norm_pair", context.dtype, size=size)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of the first and the next columns of x [T, a + b or more]: [T, a], [T, b]."""
        first, second = self._layers
        out: tuple[torch.Tensor, torch.Tensor] = self._pair(
            x, first.weight, second.weight, first.eps, self._norm
        )
        return out


class ResidualRMSNorm(RMSNorm):
    """A norm between two layers: it completes the sum that the first one leaves to the ranks."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__(size, eps, context)
        ops, group = context.ops, context.group
        self._group = group
        self._add_norm = ops.resolve("add_rms_norm", context.dtype, size=size)
        self._reduce_add_norm = None
        if group.size > 1:
            self._reduce_add_norm = ops.resolve(
                "all_reduce_add_rms_norm",
                context.dtype,
                size=size,
                num_ranks=group.size,
                peer_access=group.peer_access,
            )

    def add(
        self, partial: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(x + residual), x + residual)`, where x is the sum of all ranks' `partial`.

        Args:
            partial: [T, size]; may be overwritten.
            residual: [T, size], the same on all ranks.
        """
        args = partial, residual, self.weight, self.eps
        out: tuple[torch.Tensor, torch.Tensor]
        if self._reduce_add_norm is None:
            out = self._add_norm(*args)
        else:
            out = self._reduce_add_norm(*args, self._group, self._add_norm)
        return out
