"""Mixture of experts in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from atom.model_ops.gates import SILU, Gate, SiluGate, SituGate
from atom.model_ops.kernels.torch.elementwise import silu_and_mul, situ_and_mul
from atom.model_ops.kernels.torch.linear import linear
from atom.model_ops.routing import Routing

_Activate = Callable[[torch.Tensor], torch.Tensor]
_Biases = tuple[torch.Tensor, torch.Tensor] | None


def moe_route(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts from logits [T, experts] float32 -> weights [T, k] float32, ids [T, k]; one
    more column each where there is a shared expert.

    `correction_bias` [experts] affects the choice only, not the weights. Source: DeepSeek-V3, arXiv
    2412.19437, section 2.1.2.
    """
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if routing.num_groups > 1:
        choice = choice.masked_fill(~_eligible(choice, routing), float("-inf"))
    ids = choice.topk(routing.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * routing.scaling
    if routing.has_shared:
        weights, ids = F.pad(weights, (0, 1), value=1.0), F.pad(ids, (0, 1), value=logits.shape[1])
    return weights, ids


def _eligible(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, experts] bool: whether an expert's group is among its token's best groups."""
    grouped = choice.view(-1, routing.num_groups, routing.group_size)
    if routing.group_score == "max":
        group_scores = grouped.amax(dim=-1)
    else:
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(routing.top_groups, dim=-1, sorted=False).indices
    mask = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return mask.repeat_interleave(routing.group_size, dim=1)


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: Gate = SILU,
    biases: _Biases = None,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](x[t])`, x [T, hidden] -> [T, hidden].

    w13: [experts, 2 * inter, hidden], gate above up. w2: [experts, hidden, inter]. Each expert's
    weights are read once, and only if a token chose it.

    Args:
        elsewhere: number of experts that other ranks hold; with any, the id `experts` stands for
            one of them, and adds nothing.
        gate: what is between the products.
        biases: [experts, 2 * inter] and [experts, hidden], of the products.
    """
    del elsewhere  # such an id adds nothing in any case
    return sum_experts(x, w13, w2, weights, ids, activation(gate), biases)


def activation(gate: Gate) -> _Activate:
    """[..., 2 * inter] -> [..., inter] as a gate says."""
    if isinstance(gate, SiluGate):
        return silu_and_mul
    if isinstance(gate, SituGate):
        return partial(situ_and_mul, beta=gate.beta, linear_beta=gate.linear_beta)
    return partial(_clamped_and_mul, alpha=gate.alpha, limit=gate.limit)


def _clamped_and_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def sum_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activate: _Activate,
    biases: _Biases = None,
) -> torch.Tensor:
    """`moe_experts` with another function [..., 2 * inter] -> [..., inter] between the products.

    Args:
        biases: [experts, 2 * inter] and [experts, hidden].
    """
    ids = ids.long()
    if x.device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        return sum_experts_on_device(x, w13, w2, weights, ids, activate, biases)
    num_experts = w13.shape[0]
    if x.shape[0] == 1:
        none = torch.zeros_like(x)
        parts = [
            _expert(x, w13[e], w2[e], activate, _of(biases, e)) if e < num_experts else none
            for e in ids[0].tolist()
        ]
        return _weighted_sum(torch.stack(parts, dim=1), weights).to(x.dtype)
    num_tokens, top_k = ids.shape
    pairs = ids.flatten()
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=num_experts)[:num_experts].tolist()
    ends = list(accumulate(counts))
    sorted_x = x[order // top_k]
    results = torch.empty_like(sorted_x)
    results[sum(counts) :] = 0.0  # of experts elsewhere
    for expert, (count, end) in enumerate(zip(counts, ends, strict=True)):
        if count:
            rows = slice(end - count, end)
            matrices = w13[expert], w2[expert]
            own = _of(biases, expert)
            results[rows] = _expert(sorted_x[rows], *matrices, activate, own)
    # Back to token order, so that a token's sum does not depend on its batch.
    in_order = torch.empty_like(results)
    in_order[order] = results
    return _weighted_sum(in_order.view(num_tokens, top_k, -1), weights).to(x.dtype)


def sum_experts_on_device(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activate: _Activate,
    biases: _Biases = None,
) -> torch.Tensor:
    """The same sum without a host sync, for graphs.

    For few (token, expert) pairs it copies the chosen experts' weights; for more, every token is
    computed by every expert.
    """
    num_tokens, top_k = ids.shape
    is_elsewhere = ids >= w13.shape[0]
    ids = ids.masked_fill(is_elsewhere, 0)
    # A copy reads, writes and reads again what computing all experts reads once.
    if 3 * ids.numel() <= w13.shape[0]:
        visits = x.repeat_interleave(top_k, dim=0)[:, None]
        which = ids.flatten()
        own = _of(biases, which)
        chosen = _all_experts(visits, w13[which], w2[which], activate, own)
        chosen = chosen.view(num_tokens, top_k, -1)
    else:
        each = x.expand(w13.shape[0], *x.shape)
        every = _all_experts(each, w13, w2, activate, biases).transpose(0, 1)
        chosen = every.gather(1, ids[:, :, None].expand(-1, -1, every.shape[-1]))
    chosen = chosen.masked_fill(is_elsewhere[:, :, None], 0.0)
    return _weighted_sum(chosen, weights).to(x.dtype)


def _all_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activate: _Activate,
    biases: _Biases,
) -> torch.Tensor:
    """x [experts, rows, hidden] -> the same shape, each expert on its own rows."""
    gate_up = torch.bmm(x, w13.transpose(1, 2))
    if biases is None:
        return torch.bmm(activate(gate_up), w2.transpose(1, 2))
    bias13, bias2 = (bias[:, None] for bias in biases)
    return torch.bmm(activate(gate_up + bias13), w2.transpose(1, 2)) + bias2


def _expert(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activate: _Activate,
    biases: _Biases,
) -> torch.Tensor:
    bias13, bias2 = (None, None) if biases is None else biases
    return linear(activate(linear(x, w13, bias13)), w2, bias2)


def _of(biases: _Biases, experts: int | torch.Tensor) -> _Biases:
    return None if biases is None else (biases[0][experts], biases[1][experts])


def _weighted_sum(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """results [T, k, hidden], weights [T, k] -> [T, hidden] float32."""
    return torch.bmm(weights[:, None], results.float())[:, 0]
