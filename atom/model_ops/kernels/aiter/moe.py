"""Mixture of experts with aiter."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from atom.model_ops.gates import refuses_gates
from atom.model_ops.kernels.aiter.shuffle import (
    SHUFFLE,
    check_shuffled,
    refuses_shuffle,
    shuffle,
)
from atom.model_ops.kernels.aiter.support import requires
from atom.model_ops.kernels.aiter.tuned_experts import TUNED, note_tuned, refuses_tuned
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.registry import OpQuery
from atom.model_ops.routing import Routing

_BIASED = EntryPoint(
    "aiter.ops.topk:biased_grouped_topk",
    "gating_output correction_bias topk_weights topk_ids num_expert_group topk_group need_renorm",
    "routed_scaling_factor",
)
_GROUPED = EntryPoint(
    "aiter.ops.topk:grouped_topk",
    "gating_output topk_weights topk_ids num_expert_group topk_group need_renorm",
    "is_softmax routed_scaling_factor",
)
_SOFTMAX = EntryPoint(
    "aiter.ops.moe_op:topk_softmax",
    "topk_weights topk_indices token_expert_indices gating_output need_renorm",
)
FUSED = EntryPoint(
    "aiter.fused_moe:fused_moe",
    "hidden_states w1 w2 topk_weight topk_ids",
    "expert_mask quant_type w1_scale w2_scale",
)

# Group counts that the routing kernels are compiled for.
_GROUPS = (1, 2, 4, 8)
# Block size of the GEMM kernels along the hidden and intermediate dimensions.
_STEP = 64


def _refuses_scores(query: OpQuery) -> str | None:
    shape = query.shape
    if shape.get("has_shared"):
        return "adds no shared expert"
    if shape["num_groups"] not in _GROUPS:
        return f"num_groups={shape['num_groups']} is none of {', '.join(map(str, _GROUPS))}"
    if shape["softmax"] and shape["has_bias"]:
        return "no softmax scores with a correction bias"
    if shape["num_groups"] > 1 and shape["softmax"] and shape["pair_scores"]:
        return "no softmax scores with groups judged by their two best"
    if shape["num_groups"] > 1 and shape["has_bias"] and not shape["pair_scores"]:
        return "no correction bias with groups judged by their best"
    return None


refuses_route = requires(_BIASED, _GROUPED, _SOFTMAX, also=_refuses_scores, dtypes=(torch.float32,))


def moe_route(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts from logits [T, experts] float32 -> weights [T, k] float32, ids [T, k]
    int32.

    Assumes that groups are ranked by their two best scores with sigmoid and bias, by the best one
    without a bias, and that the bias does not affect the weights.
    """
    shape = logits.shape[0], routing.top_k
    weights = logits.new_empty(shape, dtype=torch.float32)
    ids = logits.new_empty(shape, dtype=torch.int32)
    groups = routing.num_groups, routing.top_groups, routing.renormalize
    is_softmax, scaling = routing.scoring == "softmax", routing.scaling
    if is_softmax and routing.num_groups == 1:
        function(_SOFTMAX)(weights, ids, torch.empty_like(ids), logits, routing.renormalize)
        weights *= scaling
    elif correction_bias is None and (routing.num_groups == 1 or routing.group_score == "max"):
        options = {"is_softmax": is_softmax, "routed_scaling_factor": scaling}
        function(_GROUPED)(logits, weights, ids, *groups, **options)
    else:
        bias = logits.new_zeros(logits.shape[1]) if correction_bias is None else correction_bias
        function(_BIASED)(logits, bias, weights, ids, *groups, routed_scaling_factor=scaling)
    return weights, ids


def _refuses_sizes(query: OpQuery) -> str | None:
    hidden, inter = query.shape["hidden_size"], query.shape["intermediate_size"]
    for name, size in (("hidden_size", hidden), ("intermediate_size", inter)):
        if size % _STEP:
            return f"{name}={size} is no multiple of {_STEP}"
    return (
        refuses_gates(query.shape)
        or refuses_shuffle(2 * inter, hidden)
        or refuses_shuffle(hidden, inter)
        or refuses_tuned(query, "No", query.dtype, query.dtype)
    )


refuses_experts = requires(FUSED, SHUFFLE, *TUNED, also=_refuses_sizes)


def note_experts(query: OpQuery) -> str:
    """What the table of ops says of `moe_experts`."""
    return note_tuned(query, "No", query.dtype, query.dtype)


def prepare_experts(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffle w13 [experts, 2 * inter, hidden] and w2 [experts, hidden, inter] in place."""
    return shuffle(w13), shuffle(w2)


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](x[t])`, x [T, hidden] -> [T, hidden].

    w13 and w2 as `prepare_experts` returns them. Assumes that SiLU is the default activation, and
    that the first half of a shuffled w13's rows is the gate.

    Raises:
        RuntimeError: for weights that were not shuffled.
    """
    check_shuffled(w13, w2)
    mask = held_experts(w13.shape[0], elsewhere, x.device)
    choices = with_masked_choice(weights, ids, mask)
    out: torch.Tensor = function(FUSED)(x.contiguous(), w13, w2, *choices, expert_mask=mask)
    return out


def with_masked_choice(
    weights: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """weights [T, k], ids [T, k] int32; with a mask one more choice, of the id that stands for
    experts elsewhere and with no weight.

    aiter's callers append it, so aiter looks a call with a mask up in its table of tuned kernels
    with one choice less than it has.
    """
    ids = ids.to(torch.int32)
    if mask is None:
        return weights, ids
    return F.pad(weights, (0, 1)), F.pad(ids, (0, 1), value=len(mask) - 1)


@lru_cache
def held_experts(count: int, elsewhere: int, device: torch.device) -> torch.Tensor | None:
    """aiter's mask [count + 1] int32 of the ids that are experts here; None if all are.

    The last id, `count`, stands for all experts elsewhere. Created once, before any graph is
    captured: the first step always runs eagerly.
    """
    if not elsewhere:
        return None
    mask = torch.ones(count + 1, dtype=torch.int32, device=device)
    mask[count] = 0
    return mask
