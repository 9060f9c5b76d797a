"""Products with quantised weights, which are dequantised once, when they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from atom.model_ops.gates import SILU, Gate
from atom.model_ops.kernels.torch.linear import linear, logits
from atom.model_ops.kernels.torch.moe import activation, sum_experts
from atom.model_ops.kernels.torch.quantise import requantise
from atom.model_ops.quant.weights import Activations, QuantWeights, dequantise

# Weights of experts are dequantised in parts of this size.
_PART_WEIGHTS = 1 << 24


@dataclass
class DenseWeights:
    """Dequantised weights.

    Attributes:
        weight: [out, in], or [experts, out, in].
        activations: how inputs are rounded before the product.
        input_order: of the inputs whose groups are rounded; None for their own.
    """

    weight: torch.Tensor
    activations: Activations | None
    input_scale: torch.Tensor | None
    input_order: torch.Tensor | None = None

    def round_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> the numbers that the product gets, as dtype of the weights."""
        if self.activations is None:
            return x
        if self.input_order is not None:
            x = x[..., self.input_order]
        return requantise(x, self.activations, self.input_scale).to(x.dtype)


def prepare_linear(weights: QuantWeights, dtype: torch.dtype) -> DenseWeights:
    """Dequantise the weights to `dtype`."""
    order, how = weights.column_order, weights.format.activations
    if how is None or not how.group:
        order = None
    else:
        weights = replace(weights, column_order=None)
    dense = dequantise(weights, dtype).contiguous()
    return DenseWeights(dense, how, weights.input_scale, order)


def prepare_experts(
    w13: QuantWeights, w2: QuantWeights, dtype: torch.dtype
) -> tuple[DenseWeights, DenseWeights]:
    """Dequantise the weights of all experts to `dtype`, expert by expert."""
    return _dense_experts(w13, dtype), _dense_experts(w2, dtype)


def _dense_experts(weights: QuantWeights, dtype: torch.dtype) -> DenseWeights:
    num_experts = weights.codes.shape[0]
    out, columns = weights.shape
    dense = torch.empty(num_experts, out, columns, dtype=dtype, device=weights.codes.device)
    step = max(1, _PART_WEIGHTS // (out * columns))
    for start in range(0, num_experts, step):
        part = weights.experts(start, start + step)
        dense[start : start + step] = dequantise(part, dtype)
    return DenseWeights(dense, weights.format.activations, weights.input_scale)


def quant_linear(x: torch.Tensor, weights: DenseWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] -> [..., out]."""
    return linear(weights.round_inputs(x), weights.weight, bias)


def quant_logits(x: torch.Tensor, weights: DenseWeights) -> torch.Tensor:
    """x [R, in] -> [R, out] float32: the sums of `quant_linear` as they are."""
    return logits(weights.round_inputs(x), weights.weight)


def quant_embedding(ids: torch.Tensor, weights: DenseWeights, dtype: torch.dtype) -> torch.Tensor:
    """Rows of what `quant_logits` multiplies: ids [T] int64 -> [T, in] of `dtype`."""
    return torch.nn.functional.embedding(ids, weights.weight).to(dtype)


def quant_experts(
    x: torch.Tensor,
    w13: DenseWeights,
    w2: DenseWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`moe_experts` of dequantised weights, with the inputs of both products rounded."""
    del elsewhere  # an id beyond the experts adds nothing
    activate = activation(gate)

    def between(gate_up: torch.Tensor) -> torch.Tensor:
        return w2.round_inputs(activate(gate_up))

    return sum_experts(w13.round_inputs(x), w13.weight, w2.weight, weights, ids, between, biases)
