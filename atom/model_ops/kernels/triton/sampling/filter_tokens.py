"""The tokens that top_k and top_p keep, without sorting: the last kept one of each row.

The order of tokens is that of their scores, descending, then of their ids, ascending. Scores become
integers of the same order. A filter deals the tokens into bins of equal ranges of these, which hold
counts (top_k) or probability masses (top_p); the bin in which the wanted amount is reached is dealt
again, until it has one order: three times for 32 bits. Several programs deal a row. Amounts are
integers, so it does not matter which of them adds first, or how many there are.

Few tokens are read: a group of `GROUP` neighbours whose largest score is below the bucket is
skipped. The k-th largest token is at least the k-th largest of all groups' maxima. Of V tokens,
those lighter than (1 - p) / V of the mass of these maxima have less than 1 - p of the row's mass: a
nucleus of mass p needs none of them.
Sources: Alabi et al., Fast k-selection algorithms for graphics processing units, 2012, for dealing
again; Gaihre et al., Dr. Top-k, arXiv 2109.08219, for maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.triton.sampling.scores import (
    INT_MAX,
    INT_MIN,
    LEAST_TEMPERATURE,
    MASS,
    ORDER_OF_NEGATIVE_INFINITY,
    mass_of,
    order_of,
    read_options,
    row_maximum,
    score_of,
    weights_of,
)

GROUP = 64
_BINS = 2048
_DEALS = 3  # of 11 bits each
_PARTS = 4  # of a row that a program deals: each program also reads all bins
_WARPS = 8
# Where a search is, int64: what `_load_bucket` returns.
_FIELDS = tl.constexpr(6)
# Rows of gathered tensors, whose alignment depends on the number of rows.
_OPTIONS = ["temperature_ptr", "min_p_ptr", "top_k_ptr", "top_p_ptr"]
_RESULTS = ["last_order_ptr", "last_id_ptr"]


@triton.jit
def _load_bucket(buckets_ptr, deal, row):
    """A row's bucket before a deal.

    Returns:
        low: its lowest order.
        last: its highest order, less `low`. 0 when the search has ended, or there is none.
        wanted: the amount of its tokens that are kept; 0 if not known yet.
        found: the amount of all its tokens.
        least: the order of the last token that top_k keeps, if top_p searches the others.
        mass: of the tokens of this order that top_k keeps.
    """
    at = buckets_ptr + (deal * tl.num_programs(0) + row) * _FIELDS
    low, last, wanted = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return low, last, wanted, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _store_bucket(buckets_ptr, deal, row, bucket):
    at = buckets_ptr + (deal * tl.num_programs(0) + row) * _FIELDS
    for i in tl.static_range(_FIELDS):
        tl.store(at + i, bucket[i])


@triton.jit
def _bins_of(bins_ptr, deal, row, BINS: tl.constexpr):
    """Pointer to a row's bins; three deals' are kept."""
    return bins_ptr + (deal % 3 * tl.num_programs(0) + row) * BINS


@triton.jit
def _shift_of(last, BINS: tl.constexpr):
    """The number of lower bits that tokens of one bin may differ in."""
    shift = last & 0
    while (last >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def _narrowed(bucket, bins_ptr, top_p, BINS: tl.constexpr):
    """The bin in which the wanted amount is reached."""
    low, last, wanted, found, least, mass = bucket
    if last > 0:
        bins = tl.arange(0, BINS)
        amounts = tl.load(bins_ptr + bins)
        if wanted == 0:
            total = tl.sum(amounts, axis=0).to(tl.float64)
            wanted = tl.ceil(top_p.to(tl.float64) * total).to(tl.int64)
        reached = tl.cumsum(amounts, axis=0, reverse=True)
        place = tl.max(tl.where(reached >= wanted, bins, 0), axis=0)
        found = tl.sum(tl.where(bins == place, amounts, 0), axis=0)
        wanted -= tl.max(tl.where(bins == place, reached, 0), axis=0) - found
        shift = _shift_of(last, BINS)
        low += place.to(tl.int64) << shift
        last = (last * 0 + 1 << shift) - 1
    return low, last, wanted, found, least, mass


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
def _begin(
    group_maxima_ptr, temperature_ptr, min_p_ptr, top_p_ptr, buckets_ptr, bins_ptr, top_k_ptr,
    vocab_size, num_groups, scale,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    GROUPS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Below which order no token is kept by the row's first filter."""
    row = tl.program_id(0).to(tl.int64)
    temperature, min_p = read_options(temperature_ptr, min_p_ptr, row, scale, MIN_P)
    groups = tl.arange(0, GROUPS)
    real = groups < num_groups
    maxima = tl.load(group_maxima_ptr + row * num_groups + groups, mask=real, other=INT_MIN)
    largest = tl.max(maxima, axis=0)
    low = largest * 0 + INT_MIN
    if TOP_P:
        top_p = tl.load(top_p_ptr + row)
        maximum = score_of(largest)
        weights = weights_of(score_of(maxima), maximum, temperature, min_p)
        # Half of it: exponentials and sums are rounded.
        bound = 0.5 * (1 - top_p) * tl.sum(tl.where(real, weights, 0.0), axis=0) / vocab_size
        if (top_p < 1) & (bound > 0):
            low = order_of(maximum + tl.maximum(temperature, LEAST_TEMPERATURE) * tl.log(bound))
    if TOP_K:
        top_k = tl.load(top_k_ptr + row)
        if top_k < vocab_size:
            low = _nth_largest(maxima, top_k, largest)
    low = tl.maximum(low, ORDER_OF_NEGATIVE_INFINITY + 1).to(tl.int64)
    everything = low * 0 + INT_MAX
    bucket = low, low * 0, everything, low * 0, low * 0 + INT_MIN, low * 0
    _store_bucket(buckets_ptr, 0, row, bucket)
    tl.store(_bins_of(bins_ptr, 1, row, BINS) + tl.arange(0, BINS), 0)


@triton.jit
def _started(bucket, largest, odds, top_k, top_p, vocab_size, COUNTS: tl.constexpr):
    """The bucket with which a filter begins, if the row has it."""
    low, last, wanted, found, least, mass = bucket
    maximum, temperature, min_p = odds
    is_cut = top_k < vocab_size
    if COUNTS:
        if is_cut:
            wanted = top_k.to(tl.int64)
            last = tl.maximum(largest - low, 1)
    elif top_p < 1:
        if is_cut:
            least = low
            own = mass_of(low.to(tl.int32), maximum, temperature, min_p)
            mass = tl.minimum(wanted, found) * own
        wanted = low * 0
        last = tl.maximum(largest - low, 1)
    return low, last, wanted, found, least, mass


@triton.jit
def _load_part(row, part, bottom, GROUP: tl.constexpr, PART: tl.constexpr):
    """Ids and scores [groups, GROUP] of a part; -inf in groups without an order from `bottom` on.

    `row` is what `_row_of` returns.
    """
    scores_ptr, _maxima_ptr, group_maxima_ptr, vocab_size = row
    groups = part * (PART // GROUP) + tl.arange(0, PART // GROUP)
    wanted = tl.load(group_maxima_ptr + groups) >= bottom
    token_ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = wanted[:, None] & (token_ids < vocab_size)
    scores = tl.load(scores_ptr + token_ids, mask=inside, other=float("-inf"))
    return token_ids, scores.to(tl.float32)


@triton.jit
def _deal_part(scores, bucket, odds, bins_ptr, COUNTS: tl.constexpr, BINS: tl.constexpr):
    """Adds the tokens of a part to the bins.

    Returns:
        The mass of the tokens below the bucket.
    """
    low, last, _wanted, _found, least, _mass = bucket
    maximum, temperature, min_p = odds
    first = low.to(tl.int32)
    order = order_of(scores)
    # Modulo 2^32: below the bucket it is larger than any bucket.
    offset = (order - first).to(tl.uint32, bitcast=True)
    is_in = (offset <= last.to(tl.uint32)) & (order > least.to(tl.int32))
    rest = low * 0
    if COUNTS:
        amounts = tl.full(scores.shape, 1, tl.int64)
    else:
        amounts = (weights_of(scores, maximum, temperature, min_p) * MASS).to(tl.int64)
        is_in = is_in & (amounts > 0)
        rest = tl.sum(tl.where(order < first, amounts, 0))
    places = (offset >> _shift_of(last, BINS).to(tl.uint32)).to(tl.int32)
    tl.atomic_add(bins_ptr + places, amounts, mask=is_in, sem="relaxed")
    return rest


@triton.jit
def _deal_parts(
    row, parts, bucket, odds, bins_ptr,
    COUNTS: tl.constexpr, FIRST: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Adds the tokens of some parts, and what a bin has beside them: the first one also has the
    last order that top_k keeps or, without top_k, all that is below the bucket.
    """
    low, _last, _wanted, _found, least, mass = bucket
    bottom = low
    if FIRST and not COUNTS:
        bottom = tl.where(low == least, low, INT_MIN)
    amount = tl.where((parts[0] == 0) & (low == least), mass, 0)
    for part in range(parts[0], parts[1]):
        if tl.load(row[1] + part) >= bottom:
            _ids, scores = _load_part(row, part, bottom, GROUP, PART)
            rest = _deal_part(scores, bucket, odds, bins_ptr, COUNTS, BINS)
            amount += tl.where(bottom < low, rest, 0)
    tl.atomic_add(bins_ptr, amount, mask=amount > 0, sem="relaxed")


@triton.jit
def _row_of(
    scores_ptr, maxima_ptr, group_maxima_ptr, index,
    row_stride, vocab_size, num_parts, num_groups,
):  # fmt: skip
    """What `_load_part` reads: scores, maxima of parts and of groups, and the number of scores."""
    maxima_ptr += index * num_parts
    group_maxima_ptr += index * num_groups
    return scores_ptr + index * row_stride, maxima_ptr, group_maxima_ptr, vocab_size


@triton.jit(do_not_specialize=["deal"], do_not_specialize_on_alignment=_OPTIONS)
def _deal(
    scores_ptr, maxima_ptr, group_maxima_ptr, temperature_ptr, min_p_ptr, top_p_ptr,
    buckets_ptr, bins_ptr, row_stride, vocab_size, num_parts, num_groups, scale, deal, top_k_ptr,
    MIN_P: tl.constexpr, TOP_K: tl.constexpr, COUNTS: tl.constexpr, FIRST: tl.constexpr,
    PARTS: tl.constexpr, OWN: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Grid: rows, `OWN` parts of a row each. Deals the bucket that the last deal found."""
    index = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    row = _row_of(
        scores_ptr, maxima_ptr, group_maxima_ptr, index,
        row_stride, vocab_size, num_parts, num_groups,
    )  # fmt: skip
    temperature, min_p = read_options(temperature_ptr, min_p_ptr, index, scale, MIN_P)
    largest, is_finite = row_maximum(maxima_ptr, index, num_parts, PARTS)
    odds = score_of(largest), temperature, min_p
    top_p = temperature * 0 + 1
    if not COUNTS:
        top_p = tl.load(top_p_ptr + index)
    bucket = _load_bucket(buckets_ptr, deal, index)
    bucket = _narrowed(bucket, _bins_of(bins_ptr, deal, index, BINS), top_p, BINS)
    if FIRST:
        top_k = largest * 0 + vocab_size
        if TOP_K:
            top_k = tl.load(top_k_ptr + index)
        if is_finite & (temperature > 0):
            bucket = _started(bucket, largest, odds, top_k, top_p, vocab_size, COUNTS)
    if program == 0:
        _store_bucket(buckets_ptr, deal + 1, index, bucket)
    bins = tl.arange(0, BINS)
    is_own = bins % tl.num_programs(1) == program
    tl.store(_bins_of(bins_ptr, deal + 2, index, BINS) + bins, 0, mask=is_own)
    if bucket[1] > 0:
        bins_ptr = _bins_of(bins_ptr, deal + 1, index, BINS)
        end = tl.minimum(program * OWN + OWN, num_parts)
        parts = program * OWN, end
        _deal_parts(row, parts, bucket, odds, bins_ptr, COUNTS, FIRST, GROUP, PART, BINS)


@triton.jit
def _nth_id(row, order, n, num_parts, GROUP: tl.constexpr, PART: tl.constexpr):
    """The id of the n-th token (from 1) with this order; INT_MAX if there are fewer."""
    seen = n & 0
    token_id = seen.to(tl.int32) + INT_MAX
    for part in range(num_parts):
        if (seen < n) & (tl.load(row[1] + part) >= order):
            token_ids, scores = _load_part(row, part, order, GROUP, PART)
            equal = tl.reshape((order_of(scores) == order).to(tl.int32), [PART])
            places = tl.cumsum(equal, axis=0) + seen
            is_it = (equal == 1) & (places == n)
            ids = tl.where(is_it, tl.reshape(token_ids, [PART]), INT_MAX)
            token_id = tl.minimum(token_id, tl.min(ids, axis=0))
            seen += tl.sum(equal, axis=0)
    return token_id


@triton.jit(do_not_specialize=["deal"], do_not_specialize_on_alignment=_OPTIONS + _RESULTS)
def _finish(
    scores_ptr, maxima_ptr, group_maxima_ptr, temperature_ptr, min_p_ptr, top_p_ptr,
    buckets_ptr, bins_ptr, row_stride, vocab_size, num_parts, num_groups, scale, deal,
    last_order_ptr, last_id_ptr,
    MIN_P: tl.constexpr, TOP_P: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Writes the order and the id of the last kept token."""
    index = tl.program_id(0).to(tl.int64)
    row = _row_of(
        scores_ptr, maxima_ptr, group_maxima_ptr, index,
        row_stride, vocab_size, num_parts, num_groups,
    )  # fmt: skip
    temperature, min_p = read_options(temperature_ptr, min_p_ptr, index, scale, MIN_P)
    top_p = temperature * 0 + 1
    if TOP_P:
        top_p = tl.load(top_p_ptr + index)
    bucket = _load_bucket(buckets_ptr, deal, index)
    bucket = _narrowed(bucket, _bins_of(bins_ptr, deal, index, BINS), top_p, BINS)
    low, _last, wanted, found, least, _mass = bucket
    order = low.to(tl.int32)
    own = low * 0 + 1
    if top_p < 1:
        largest, _is_finite = row_maximum(maxima_ptr, index, num_parts, PARTS)
        own = mass_of(order, score_of(largest), temperature, min_p)
    last_id = order * 0 + INT_MAX
    if (wanted + own <= found) | (low == least):
        ties = (wanted + own - 1) // tl.maximum(own, 1)
        last_id = _nth_id(row, order, ties, num_parts, GROUP, PART)
    tl.store(last_order_ptr + index, order)
    tl.store(last_id_ptr + index, last_id)


def last_kept(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    group_maxima: torch.Tensor,
    part: int,
    m: SamplingMetadata,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order and id [R] int32 of the last token that each row of scores [R, V] keeps.

    Args:
        maxima: [R, parts] int32, the orders of the largest score of each part of `part` tokens.
        group_maxima: [R, groups] int32, those of each group of `GROUP` tokens, or of all if a part
            has fewer.
        scale: multiplies temperatures.
    """
    num_rows, vocab_size = scores.shape
    num_parts, num_groups = maxima.shape[1], group_maxima.shape[1]
    bins = torch.empty(3, num_rows, _BINS, dtype=torch.int64, device=scores.device)
    buckets = bins.new_empty(2 * _DEALS + 1, num_rows, _FIELDS.value)
    last_order, last_id = maxima.new_empty(2, num_rows)
    *options, top_k = (
        scores if option is None else option
        for option in (m.temperature, m.min_p, m.top_p, m.top_k)
    )
    given = {"MIN_P": m.min_p, "TOP_K": m.top_k, "TOP_P": m.top_p}
    filters = {name: option is not None for name, option in given.items()}
    _begin[(num_rows,)](
        group_maxima, *options, buckets, bins, top_k, vocab_size, num_groups, scale,
        **filters, GROUPS=triton.next_power_of_2(num_groups), BINS=_BINS, num_warps=_WARPS,
    )  # fmt: skip
    tensors = scores, maxima, group_maxima, *options, buckets, bins
    numbers = scores.stride(0), vocab_size, num_parts, num_groups, scale
    settings = {"GROUP": min(part, GROUP), "PART": part, "BINS": _BINS, "num_warps": _WARPS}
    settings |= {"PARTS": triton.next_power_of_2(num_parts), "MIN_P": filters["MIN_P"]}
    grid = num_rows, triton.cdiv(num_parts, _PARTS)
    counts = [True] * filters["TOP_K"] + [False] * filters["TOP_P"]
    num_deals = _DEALS * len(counts)
    for deal in range(num_deals):
        _deal[grid](
            *tensors, *numbers, deal, top_k,
            TOP_K=filters["TOP_K"], COUNTS=counts[deal // _DEALS], FIRST=deal % _DEALS == 0,
            OWN=_PARTS, **settings,
        )  # fmt: skip
    _finish[(num_rows,)](
        *tensors, *numbers, num_deals, last_order, last_id, TOP_P=filters["TOP_P"], **settings
    )
    return last_order, last_id
