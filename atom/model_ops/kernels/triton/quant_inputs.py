"""Inputs of products with quantised weights, quantised as their format says."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.triton.quant_layout import TileWeights
from atom.model_ops.kernels.triton.quantise import round_rows
from atom.model_ops.quant.rounding import QuantInputs, Rows
from atom.model_ops.registry import OpQuery


def takes_rounded(query: OpQuery) -> bool:
    """Whether a norm may round the inputs."""
    return query.weights is not None and query.weights.activations is not None


def read_inputs(x: Rows, weights: TileWeights) -> QuantInputs:
    """x [..., in], or what a norm made of it, with columns in the order of the weights'."""
    if isinstance(x, QuantInputs):
        return x
    x = x.reshape(-1, weights.inputs)
    if weights.column_order is not None:
        x = x.index_select(1, weights.column_order)
    how = weights.input_rounding
    return QuantInputs(x, None, 0, x.dtype) if how is None else round_rows(x, how)


def is_wide(x: QuantInputs) -> bool:
    """Whether numbers are multiplied in float32."""
    return x.numbers.dtype == torch.float32


def is_scaled(x: QuantInputs, weights: TileWeights) -> bool:
    """Whether products of codes are multiplied by scales before they are added up."""
    return weights.way == "codes" and (x.group > 0 or weights.scale is not None)


def is_exact(x: QuantInputs, weights: TileWeights) -> bool:
    """Whether sums are of integers."""
    return x.numbers.dtype == torch.int8 and not is_scaled(x, weights)
