"""Expert routing in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products import moe_align
from atom.model_ops.registry import OpQuery
from atom.model_ops.routing import Routing

_EXCLUDED = tl.constexpr(-(2**63))
_MAX_TOP_K = 16


def refuses(query: OpQuery) -> str | None:
    """Why this routing is not supported; None if it is."""
    if query.dtype != torch.float32:
        return f"logits in {query.dtype}, not float32"
    if query.shape["top_k"] > _MAX_TOP_K:
        return f"{query.shape['top_k']} experts a token, at most {_MAX_TOP_K}"
    return moe_align.refuses(query)


def moe_route(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts from logits [T, experts] float32 -> weights [T, k] float32, ids [T, k] int32.

    `correction_bias` [experts] affects the choice only, not the weights. Experts are ordered best
    first; ties go to the lowest id, for groups and experts (torch leaves the order of ties open).
    NaN ranks highest, so that ids are always valid. A shared expert follows in a column of its own.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    num_tokens, visits = logits.shape[0], routing.visits
    weights = torch.empty(num_tokens, visits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, visits, dtype=torch.int32, device=logits.device)
    if num_tokens:
        _route[(num_tokens,)](
            logits,
            logits if correction_bias is None else correction_bias,
            weights,
            ids,
            routing.scaling,
            *logits.stride(),
            HAS_BIAS=correction_bias is not None,
            SIGMOID=routing.scoring == "sigmoid",
            RENORMALIZE=routing.renormalize,
            TOP2_SUM=routing.group_score == "top2_sum",
            GROUPS=routing.num_groups,
            GROUP_SIZE=routing.group_size,
            TOP_GROUPS=routing.top_groups,
            TOP_K=routing.top_k,
            VISITS=visits,
            GROUPS_PADDED=triton.next_power_of_2(routing.num_groups),
            SIZE_PADDED=triton.next_power_of_2(routing.group_size),
            VISITS_PADDED=triton.next_power_of_2(visits),
            num_warps=1,
        )
    return weights, ids


@triton.jit
def _key(value, index):
    """An int64 that sorts like (value, -index), with NaN above infinity."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _key_value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _eligible(
    keys,
    groups,
    TOP2_SUM: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """Keys [groups, size] -> [groups] bool: whether a group is among the best."""
    best = tl.max(keys, 1)
    score = _key_value(best)
    if TOP2_SUM:
        second = tl.max(tl.where(keys == best[:, None], _EXCLUDED, keys), 1)
        score += _key_value(second)
    group_keys = tl.where(groups < GROUPS, _key(score, groups), _EXCLUDED)
    chosen = groups < 0
    for _ in tl.static_range(TOP_GROUPS):
        is_best = group_keys == tl.max(group_keys, 0)
        chosen = chosen | is_best
        group_keys = tl.where(is_best, _EXCLUDED, group_keys)
    return chosen


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    scaling,
    stride_token,
    stride_expert,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    VISITS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    VISITS_PADDED: tl.constexpr,
):
    """Routes one token, with its keys as a matrix [groups, size]."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride_token
    groups = tl.arange(0, GROUPS_PADDED)
    members = tl.arange(0, SIZE_PADDED)
    experts = groups[:, None] * GROUP_SIZE + members[None, :]
    exists = (groups < GROUPS)[:, None] & (members < GROUP_SIZE)[None, :]
    logits = tl.load(row_ptr + experts * stride_expert, mask=exists, other=float("-inf"))
    if SIGMOID:
        largest = 0.0
        total = 1.0
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        largest = tl.max(logits)
        powers = tl.exp(logits - largest)
        total = tl.sum(powers)
        scores = powers / total
    if HAS_BIAS:
        scores += tl.load(bias_ptr + experts, mask=exists, other=0.0)
    keys = tl.where(exists, _key(scores, experts), _EXCLUDED)
    if TOP_GROUPS < GROUPS:
        chosen = _eligible(keys, groups, TOP2_SUM, GROUPS, TOP_GROUPS)
        keys = tl.where(chosen[:, None], keys, _EXCLUDED)

    places = tl.arange(0, VISITS_PADDED)
    ids = tl.zeros([VISITS_PADDED], tl.int64)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys)
        ids = tl.where(places == place, 0x7FFFFFFF - (best & 0x7FFFFFFF), ids)
        keys = tl.where(keys == best, _EXCLUDED, keys)

    # Weights are computed from the scores without the bias.
    chosen_logits = tl.load(row_ptr + ids * stride_expert)
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-chosen_logits))
    else:
        weights = tl.exp(chosen_logits - largest) / total
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(places < TOP_K, weights, 0.0), 0) + 1e-20)
    weights *= scaling
    if VISITS > TOP_K:
        weights = tl.where(places < TOP_K, weights, 1.0)
        ids = tl.where(places < TOP_K, ids, GROUPS * GROUP_SIZE)
    out = token * VISITS + places
    tl.store(weights_ptr + out, weights, mask=places < VISITS)
    tl.store(ids_ptr + out, ids.to(tl.int32), mask=places < VISITS)
