"""Inputs of products with quantised weights, quantised as their format says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom.model_ops.kernels.triton.quant_layout import SPAN, TileWeights
from atom.model_ops.kernels.triton.quantise import quantise, requantise


@dataclass(frozen=True)
class QuantInputs:
    """What a product with quantised weights reads.

    Attributes:
        numbers: [T, inputs], or codes of whole spans.
        scale: [T, groups] or [T, 1], of codes or of numbers with one scale per token.
        group: inputs per scale that the product applies; 0 for one per token.
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None = None
    group: int = 0

    @property
    def is_wide(self) -> bool:
        return self.numbers.dtype == torch.float32

    def is_scaled(self, weights: TileWeights) -> bool:
        """Whether products of codes are multiplied by scales before they are added up."""
        return weights.way == "codes" and (self.group > 0 or weights.scale is not None)

    def is_exact(self, weights: TileWeights) -> bool:
        """Whether sums are of integers."""
        return self.numbers.dtype == torch.int8 and not self.is_scaled(weights)

    @classmethod
    def of(cls, x: torch.Tensor, weights: TileWeights) -> QuantInputs:
        """x [T, in], its columns in the order of the weights'."""
        if weights.column_order is not None:
            x = x.index_select(1, weights.column_order)
        how, given = weights.format.activations, (weights.input_scale, weights.fp8)
        if how is None:
            return cls(x)
        if weights.way != "numbers":
            return cls(*quantise(x, how, *given, multiple=SPAN), how.group)
        if how.group:
            return cls(requantise(x, how, *given))
        return cls(*quantise(x, how, *given, dtype=x.dtype))
