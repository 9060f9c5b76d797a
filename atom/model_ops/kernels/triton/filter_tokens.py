"""The tokens that top_k and top_p keep, without sorting: the last kept one of each row.

The order of tokens is that of their scores, descending, then of their ids, ascending. Scores become
integers of the same order, and bisection over these finds the count (top_k) or the probability mass
(top_p). Masses are integers, so their sums do not depend on the order.

Bisection reads few tokens: groups of `GROUP` neighbours whose largest score is known. The k largest
tokens are in the groups whose maximum is at least the k-th largest of all maxima. Of V tokens,
those lighter than (1 - p) / V of the mass of all maxima have less than 1 - p of the row's mass: a
nucleus of mass p needs none of them.
Source: Gaihre et al., Dr. Top-k, arXiv 2109.08219, for the first of these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.scores import (
    INT_MAX,
    INT_MIN,
    MASS,
    load_scores,
    mass_of,
    order_of,
    read_options,
    row_maximum,
    score_of,
    weights_of,
)
from atom.model_ops.metadata import SamplingMetadata

GROUP = 64
_TILE = 4096  # tokens per iteration
# Rows of gathered tensors, whose alignment depends on the number of rows.
_OPTIONS = ["temperature_ptr", "min_p_ptr", "top_k_ptr", "top_p_ptr", "counts_ptr"]
_RESULTS = ["last_order_ptr", "last_id_ptr"]


@triton.jit
def _nth_largest(orders, n, largest):
    """The n-th largest (from 1) of orders [N]; INT_MIN if there are fewer."""
    low = (largest & 0).to(tl.int64) + INT_MIN
    high = largest.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((orders >= middle).to(tl.int32), axis=0) >= n
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def _list_groups(
    maxima_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, groups_ptr, counts_ptr,
    vocab_size, num_groups, scale,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Lists the groups, ascending, in which the last kept token can be."""
    row = tl.program_id(0).to(tl.int64)
    temperature, min_p = read_options(temperature_ptr, min_p_ptr, row, scale, MIN_P)
    groups = tl.arange(0, GROUPS)
    real = groups < num_groups
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=real, other=INT_MIN)
    largest = tl.max(maxima, axis=0)
    wanted = groups < 0
    if TOP_P:
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            weights = weights_of(score_of(maxima), score_of(largest), temperature, min_p)
            weights = tl.where(real, weights, 0.0)
            # Half of it: exponentials and sums are rounded.
            wanted = weights >= 0.5 * (1 - top_p) * tl.sum(weights, axis=0) / vocab_size
    if TOP_K:
        top_k = tl.load(top_k_ptr + row)
        if top_k < vocab_size:
            wanted = maxima >= _nth_largest(maxima, top_k, largest)
    wanted = wanted & real
    places = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.store(groups_ptr + row * num_groups + places, groups, mask=wanted)
    tl.store(counts_ptr + row, tl.sum(wanted.to(tl.int32), axis=0))


@triton.jit
def _load_listed(row, start, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Ids and scores of the listed tokens [TILE] from `start` on, and which of them there are.

    `row` is (scores of the row, vocab_size, list of groups, number of groups).
    """
    scores_ptr, vocab_size, groups_ptr, count = row
    places = start + tl.arange(0, TILE)
    inside = places < count * GROUP
    group = tl.load(groups_ptr + places // GROUP, mask=inside, other=0)
    token_ids = group * GROUP + places % GROUP
    inside = inside & (token_ids < vocab_size)
    scores = tl.load(scores_ptr + token_ids, mask=inside, other=float("-inf"))
    return token_ids, scores.to(tl.float32), inside


@triton.jit
def _probe(row, middle, floor, odds, COUNTS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Number or mass of the listed tokens whose order is at least `middle`.

    Also the smallest of those orders, and the largest order in floor .. middle - 1. `odds` is
    (maximum, temperature, min_p).
    """
    maximum, temperature, min_p = odds
    total = tl.zeros([TILE], tl.int32 if COUNTS else tl.int64)
    above = tl.full([TILE], INT_MAX, tl.int32)
    below = tl.full([TILE], INT_MIN, tl.int32)
    for start in range(0, row[3] * GROUP, TILE):
        _ids, scores, inside = _load_listed(row, start, GROUP, TILE)
        order = order_of(scores)
        is_above = (order >= middle) & inside
        if COUNTS:
            amounts = is_above.to(tl.int32)
        else:
            amounts = (weights_of(scores, maximum, temperature, min_p) * MASS).to(tl.int64)
            amounts = tl.where(is_above, amounts, 0)
        total += amounts
        above = tl.where(is_above, tl.minimum(above, order), above)
        is_below = (order < middle) & (order >= floor) & inside
        below = tl.where(is_below, tl.maximum(below, order), below)
    return tl.sum(total.to(tl.int64), axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _bisect(
    row, wanted, low, high, odds, COUNTS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """The largest order in low .. high such that tokens of at least this order amount to `wanted`.

    This must hold for `low`; `high` is the largest order. Both ends move to orders that occur, so
    that scores of a coarse dtype need few steps.

    Returns:
        That order, and the amount of the tokens above it.
    """
    floor = low
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    beyond = high & 0
    while low < high:
        middle = (low + (high - low + 1) // 2).to(tl.int32)
        amount, above, below = _probe(row, middle, floor, odds, COUNTS, GROUP, TILE)
        enough = amount >= wanted
        low = tl.where(enough, above.to(tl.int64), low)
        high = tl.where(enough, high, below.to(tl.int64))
        beyond = tl.where(enough, beyond, amount)
    return low.to(tl.int32), beyond


@triton.jit
def _nth_id(row, order, n, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The id of the n-th token (from 1) with this order; INT_MAX if there are fewer."""
    seen = n & 0
    token_id = seen.to(tl.int32) + INT_MAX
    for start in range(0, row[3] * GROUP, TILE):
        token_ids, scores, inside = _load_listed(row, start, GROUP, TILE)
        equal = ((order_of(scores) == order) & inside).to(tl.int32)
        found = tl.sum(equal, axis=0)
        if (seen < n) & (seen + found >= n):
            is_it = (equal == 1) & (tl.cumsum(equal, axis=0) + seen == n)
            token_id = tl.min(tl.where(is_it, token_ids, INT_MAX), axis=0)
        seen += found
    return token_id


@triton.jit
def _mass(scores_ptr, vocab_size, odds, TILE: tl.constexpr):
    """The mass of all tokens of a row."""
    maximum, temperature, min_p = odds
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, vocab_size, TILE):
        scores = load_scores(scores_ptr, start + tl.arange(0, TILE), vocab_size)
        total += (weights_of(scores, maximum, temperature, min_p) * MASS).to(tl.int64)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize_on_alignment=_OPTIONS + _RESULTS)
def _last_kept(
    scores_ptr, maxima_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr,
    groups_ptr, counts_ptr, last_order_ptr, last_id_ptr,
    row_stride, vocab_size, num_parts, num_groups, scale,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Writes the order and the id of the last kept token."""
    index = tl.program_id(0).to(tl.int64)
    temperature, min_p = read_options(temperature_ptr, min_p_ptr, index, scale, MIN_P)
    largest, is_finite = row_maximum(maxima_ptr, index, num_parts, PARTS)
    maximum = score_of(largest)
    odds = maximum, temperature, min_p
    scores_ptr += index * row_stride
    row = scores_ptr, vocab_size, groups_ptr + index * num_groups, tl.load(counts_ptr + index)
    order = largest * 0 + INT_MIN
    # How many tokens of the last order are kept; all of them by default.
    ties = (largest * 0).to(tl.int64) + INT_MAX
    is_random = is_finite & (temperature > 0)
    top_k = (largest * 0).to(tl.int64) + vocab_size
    if TOP_K:
        top_k = tl.load(top_k_ptr + index).to(tl.int64)
        if is_random & (top_k < vocab_size):
            order, beyond = _bisect(row, top_k, order, largest, odds, True, GROUP, TILE)
            ties = top_k - beyond
    if TOP_P:
        top_p = tl.load(top_p_ptr + index)
        if is_random & (top_p < 1):
            own = mass_of(order, maximum, temperature, min_p)
            if top_k < vocab_size:
                mass, _above, _below = _probe(row, order + 1, largest, odds, False, GROUP, TILE)
                total = mass + ties * own
            else:
                mass = _mass(scores_ptr, vocab_size, odds, TILE)
                total = mass
            limit = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            if mass >= limit:
                order, mass = _bisect(row, limit, order + 1, largest, odds, False, GROUP, TILE)
                own = mass_of(order, maximum, temperature, min_p)
                ties = ties * 0 + INT_MAX
            if own > 0:
                ties = tl.minimum(ties, (limit - mass + own - 1) // own)
    last_id = largest * 0 + INT_MAX
    if ties < INT_MAX:
        last_id = _nth_id(row, order, ties, GROUP, TILE)
    tl.store(last_order_ptr + index, order)
    tl.store(last_id_ptr + index, last_id)


def last_kept(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    group_maxima: torch.Tensor,
    m: SamplingMetadata,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order and id [R] int32 of the last token that each row of scores [R, V] keeps.

    Args:
        maxima: [R, parts] int32, the orders of the largest score of each part.
        group_maxima: [R, groups] int32, those of each group of `GROUP` tokens.
        scale: multiplies temperatures.
    """
    num_rows, vocab_size = scores.shape
    num_parts, num_groups = maxima.shape[1], group_maxima.shape[1]
    groups = torch.empty_like(group_maxima)
    counts, last_order, last_id = maxima.new_empty(3, num_rows)
    options = [
        scores if option is None else option
        for option in (m.temperature, m.min_p, m.top_k, m.top_p)
    ]
    filters = {
        "MIN_P": m.min_p is not None,
        "TOP_K": m.top_k is not None,
        "TOP_P": m.top_p is not None,
    }
    _list_groups[(num_rows,)](
        group_maxima, *options, groups, counts, vocab_size, num_groups, scale,
        **filters, GROUPS=triton.next_power_of_2(num_groups), num_warps=8,
    )  # fmt: skip
    _last_kept[(num_rows,)](
        scores, maxima, *options, groups, counts, last_order, last_id,
        scores.stride(0), vocab_size, num_parts, num_groups, scale,
        **filters, PARTS=triton.next_power_of_2(num_parts), GROUP=GROUP,
        TILE=min(triton.next_power_of_2(vocab_size), _TILE), num_warps=16,
    )  # fmt: skip
    return last_order, last_id
