"""Inputs of products with quantised weights, quantised as their format says."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.triton.products.quant_layout import SPAN, TileWeights
from atom.model_ops.kernels.triton.products.quantise import largest_code, round_rows
from atom.model_ops.quant.rounding import QuantInputs, Rows
from atom.model_ops.registry import OpQuery

# Rows of the smallest tile, and bytes of weights for which rounding them anew in each program is
# expected to cost less than a launch.
_FEW_ROWS = 16
_MOST_BYTES = 128 << 20


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


def limit_within(x: Rows, weights: TileWeights) -> float:
    """The largest code of few inputs that the product rounds itself, which saves a launch; 0 where
    they are rounded before it.

    Every program rounds all inputs of its rows again, while it waits for weights. What that may
    cost grows with the weights, a launch costs the same, hence a limit.
    """
    rounding = weights.rounding
    if isinstance(x, QuantInputs) or rounding is None or weights.way != "codes":
        return 0.0
    how = rounding.how
    by_span = how.group == SPAN and how.scale_type == "float" and not how.is_static
    if not by_span or weights.format.codes == "int4" or weights.inputs % SPAN:
        return 0.0
    few = x.numel() <= _FEW_ROWS * weights.inputs and weights.codes.nbytes <= _MOST_BYTES
    return largest_code(rounding) if few else 0.0


def as_they_are(x: Rows, weights: TileWeights) -> QuantInputs:
    """Rows that `limit_within` leaves to the product."""
    assert isinstance(x, torch.Tensor)
    rows = x.reshape(-1, weights.inputs)
    return QuantInputs(rows if rows.stride(1) == 1 else rows.contiguous(), None, SPAN, x.dtype)


def is_wide(x: QuantInputs) -> bool:
    """Whether numbers are multiplied in float32."""
    return x.numbers.dtype == torch.float32


def is_scaled(x: QuantInputs, weights: TileWeights) -> bool:
    """Whether products of codes are multiplied by scales before they are added up."""
    return weights.way == "codes" and (x.group > 0 or weights.scale is not None)


def is_exact(x: QuantInputs, weights: TileWeights) -> bool:
    """Whether sums are of integers."""
    return x.numbers.dtype == torch.int8 and not is_scaled(x, weights)
