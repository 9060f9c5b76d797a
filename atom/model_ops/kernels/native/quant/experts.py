"""Experts with packed quantised weights, and with those that are dequantised when loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from atom.model_ops.gates import SILU, Gate
from atom.model_ops.kernels.native.bindings import (
    Kernels,
    constant,
    mismatch,
    num_threads,
    rows_apart,
)
from atom.model_ops.kernels.native.moe import bias_addresses, moe_experts
from atom.model_ops.kernels.native.quant import pack
from atom.model_ops.kernels.native.quant.pack import PackedWeights
from atom.model_ops.kernels.torch.quant import DenseWeights
from atom.model_ops.quant.weights import (
    FP4_VALUES,
    INT6_ZERO,
    QuantWeights,
    WeightFormat,
    pack_int6,
)
from atom.model_ops.registry import OpQuery

_experts = Kernels("quant_experts", "18P32q4d")


def refuses(query: OpQuery) -> str | None:
    """Why experts of this format cannot be multiplied packed; None if they can."""
    inter = query.shape["intermediate_size"]
    if inter % constant("lanes"):
        return f"intermediate_size={inter} is no multiple of {constant('lanes')}"
    assert query.weights is not None
    sizes = query.shape["hidden_size"], inter
    for form, size in zip((query.weights, query.down_weights or query.weights), sizes, strict=True):
        if reason := pack.refuses_inputs(packed_form(form), size):
            return reason
    return None


def refuses_dense(query: OpQuery) -> str | None:
    """Why dequantised experts are not for these kernels; None if they are."""
    assert query.weights is not None
    for form in filter(None, (query.weights, query.down_weights)):
        if form.activations is not None:
            return f"leaves inputs as they are, not {form.activations}"
    return None


def prepare(
    w13: QuantWeights, w2: QuantWeights, dtype: torch.dtype
) -> tuple[PackedWeights, PackedWeights]:
    """Pack the matrices of all experts for inputs of any dtype; none of their numbers changes."""
    del dtype
    first, second = (pack.prepare(_as_integers(w), torch.float32) for w in (w13, w2))
    return first, second


def packed_form(form: WeightFormat) -> WeightFormat:
    """That in which weights are packed: MXFP4's numbers, doubled, are integers of 6 bits."""
    if (form.codes, form.scale_type, form.rows) != ("fp4", "e8m0", 1):
        return form
    return replace(form, codes="int6", scale_type="float")


def _as_integers(weights: QuantWeights) -> QuantWeights:
    form = packed_form(weights.format)
    if form == weights.format:
        return weights
    assert weights.scale is not None
    experts, out, half = weights.codes.shape
    codes = weights.codes.new_empty(experts, out, half * 2 * 3 // 4)
    doubled = torch.tensor([int(2 * value) for value in FP4_VALUES], dtype=torch.uint8)
    doubled = torch.cat((INT6_ZERO + doubled, INT6_ZERO - doubled))
    for target, source in zip(codes, weights.codes, strict=True):
        pairs = torch.stack((source & 15, source >> 4), dim=-1).flatten(-2)
        target.copy_(pack_int6(doubled[pairs.int()]))
    # bfloat16 has all powers of two that a byte stands for, and the half of the least.
    scale = torch.exp2(weights.scale.double() - 128).to(torch.bfloat16)
    return QuantWeights(form, codes, scale)


def quant_experts(
    x: torch.Tensor,
    w13: PackedWeights,
    w2: PackedWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](x[t])`, x [T, hidden] -> [T, hidden].

    w13: of [2 * inter, hidden], gate above up. w2: of [hidden, inter]. Products as of
    `quant_linear`; what is between them is rounded once. A row's result has the same bits in every
    batch. Ids from the number of experts on add nothing.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a negative id.
    """
    del elsewhere  # such an id adds nothing in any case
    rows, hidden = x.shape
    experts, inter = w13.codes.shape[0], w2.in_features
    if (
        (w13.in_features, w13.out_features, w2.out_features) != (hidden, 2 * inter, hidden)
        or w2.codes.shape[0] != experts
        or ids.shape != (rows, ids.shape[-1])
        or weights.shape != ids.shape
        or weights.dtype is not torch.float32
        or ids.dtype not in (torch.int32, torch.int64)
    ):
        raise mismatch("quant_experts", x=x, w13=w13.codes, w2=w2.codes, weights=weights, ids=ids)
    biases_at = bias_addresses(biases, experts, inter, x)
    weights, ids = weights.contiguous(), ids.contiguous()
    x, stride = rows_apart(x)
    out = x.new_empty(rows, hidden)
    wrong = _experts(
        x.dtype,
        x.data_ptr(),
        *w13.addresses(),
        *w2.addresses(),
        *(weights.data_ptr(), ids.data_ptr(), out.data_ptr()),
        *biases_at,
        *(rows, stride, ids.shape[-1], experts, ids.itemsize),
        *w13.sizes,
        *w2.sizes,
        num_threads(),
        *(w13.fixed_scale, w2.fixed_scale, *gate.numbers),
    )
    if wrong:
        raise IndexError(f"token {wrong - 1} has experts {ids[wrong - 1].tolist()}")
    return out


def dense_experts(
    x: torch.Tensor,
    w13: DenseWeights,
    w2: DenseWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`quant_experts` of dequantised weights."""
    return moe_experts(x, w13.weight, w2.weight, weights, ids, elsewhere, gate, biases)
