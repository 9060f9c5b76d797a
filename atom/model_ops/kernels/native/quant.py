"""Products with quantised weights, which are dequantised once, when they are loaded."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.linear import linear
from atom.model_ops.kernels.torch.quant import DenseWeights


def quant_linear(x: torch.Tensor, weights: DenseWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, in] -> [M, out]."""
    return linear(weights.round_inputs(x), weights.weight, bias)
