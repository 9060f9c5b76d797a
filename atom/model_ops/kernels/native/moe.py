"""Mixture of experts: the choice, and the experts' products with each weight read once."""

from __future__ import annotations

import torch

from atom.model_ops.gates import SILU, Gate
from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads, rows_apart
from atom.model_ops.registry import OpQuery
from atom.model_ops.routing import Routing

_route = Kernels("moe_route", "4P9qd")
_experts = Kernels("moe_experts", "8P8q2d")
_ONLY_EXPERT = Routing(num_experts=1, top_k=1, scoring="sigmoid")


def refuses_route(query: OpQuery) -> str | None:
    """Shared experts are products of their own on a CPU, where a call costs next to nothing."""
    return "adds no shared expert" if query.shape.get("has_shared") else None


def moe_route(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, experts] float32 -> weights [T, k] float32, ids [T, k] int32, the best first.

    Raises:
        ValueError: when shapes or data types do not fit.
    """
    rows, experts = logits.shape
    bias = correction_bias
    if (
        experts != routing.num_experts
        or logits.dtype is not torch.float32
        or (bias is not None and (bias.numel() != experts or bias.dtype is not torch.float32))
    ):
        raise mismatch("moe_route", logits=logits, **({} if bias is None else {"bias": bias}))
    logits = logits.contiguous()
    weights = logits.new_empty(rows, routing.top_k)
    ids = logits.new_empty(rows, routing.top_k, dtype=torch.int32)
    bias_at = 0 if bias is None else bias.data_ptr()
    groups = routing.num_groups, routing.top_groups
    flags = routing.scoring == "softmax", routing.group_score == "top2_sum", routing.renormalize
    pointers = logits.data_ptr(), bias_at, weights.data_ptr(), ids.data_ptr()
    sizes = rows, experts, routing.top_k, *groups, *flags
    _route(None, *pointers, *sizes, num_threads(), routing.scaling)
    return weights, ids


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))` of x [N] float32: the weight of a token's only expert."""
    weights, _ = moe_route(x[:, None], None, _ONLY_EXPERT)
    return weights[:, 0]


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: Gate = SILU,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](x[t])`, x [T, hidden] -> [T, hidden].

    w13: [experts, 2 * inter, hidden], gate above up. w2: [experts, hidden, inter]. Sums are in
    float32; what is between the products is rounded once. A row's result has the same bits in every
    batch. Ids from `experts` on add nothing. biases: [experts, 2 * inter] and [experts, hidden].

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a negative id.
    """
    del elsewhere  # such an id adds nothing in any case
    rows, hidden = x.shape
    experts, inter = w13.shape[0], w2.shape[-1]
    top_k = ids.shape[-1]
    dtype = x.dtype
    if (
        w13.shape != (experts, 2 * inter, hidden)
        or w2.shape != (experts, hidden, inter)
        or weights.shape != (rows, top_k)
        or ids.shape != weights.shape
        or w13.dtype is not dtype
        or w2.dtype is not dtype
        or weights.dtype is not torch.float32
        or ids.dtype not in (torch.int32, torch.int64)
        or not all(t.is_contiguous() for t in (w13, w2))
    ):
        raise mismatch("moe_experts", x=x, w13=w13, w2=w2, weights=weights, ids=ids)
    biases_at = bias_addresses(biases, experts, inter, x)
    weights, ids = weights.contiguous(), ids.contiguous()
    x, stride = rows_apart(x)
    out = x.new_empty(rows, hidden)
    matrices = x.data_ptr(), w13.data_ptr(), w2.data_ptr()
    choices = weights.data_ptr(), ids.data_ptr()
    sizes = rows, hidden, inter, experts, top_k, stride, ids.itemsize, num_threads()
    pointers = *matrices, *choices, out.data_ptr(), *biases_at
    wrong = _experts(dtype, *pointers, *sizes, *gate.numbers)
    if wrong:
        raise IndexError(f"token {wrong - 1} has experts {ids[wrong - 1].tolist()}")
    return out


def bias_addresses(
    biases: tuple[torch.Tensor, torch.Tensor] | None, experts: int, inter: int, x: torch.Tensor
) -> tuple[int, int]:
    """Of the biases of experts that compute x [T, hidden]; 0 without any.

    Raises:
        ValueError: when shapes or data types do not fit.
    """
    if biases is None:
        return 0, 0
    bias13, bias2 = biases
    if (
        bias13.shape != (experts, 2 * inter)
        or bias2.shape != (experts, x.shape[1])
        or not bias13.dtype is bias2.dtype is x.dtype
        or not (bias13.is_contiguous() and bias2.is_contiguous())
    ):
        raise mismatch("moe_experts", x=x, bias13=bias13, bias2=bias2)
    return bias13.data_ptr(), bias2.data_ptr()
