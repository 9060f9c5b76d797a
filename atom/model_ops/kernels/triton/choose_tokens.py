"""Samples tokens in a fixed sequence of launches, without host syncs.

A row is processed by four kernels; except for the second, each splits it over the vocabulary:

1. the maximum score of each part;
2. for rows with top_k or top_p, the last kept token, in descending order of score and then
  ascending order of id. Scores become integers of the same order, and bisection over these finds
  the count (top_k) or the probability mass (top_p). Masses are integers, so their sums do not
  depend on the order;
3. the winner of each part's exponential race, packed into an integer: the order of its value in the
  upper bits, the reversed token id in the lower ones;
4. the winner of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.noise import exponential, random_bits, row_keys
from atom.model_ops.kernels.triton.scores import (
    INT_MAX,
    INT_MIN,
    MASS,
    ORDER_OF_INFINITY,
    ORDER_OF_NEGATIVE_INFINITY,
    load_scores,
    mass_of,
    order_of,
    read_options,
    row_maximum,
    score_of,
    weights_of,
)
from atom.model_ops.metadata import SamplingMetadata
from atom.model_ops.registry import OpQuery

# So that the sum of all masses fits in int64.
_LARGEST_VOCABULARY = 2**18
_PART = 4096  # tokens per program when a row is split
_TILE = 8192  # tokens per iteration when a program reads a whole row
# Rows of one gathered tensor, whose alignment depends on the number of rows.
_OPTIONS = ["temperature_ptr", "min_p_ptr", "top_k_ptr", "top_p_ptr"]


def refuses(query: OpQuery) -> str | None:
    """Why this vocabulary is not supported; None if it is."""
    size = query.shape["vocab_size"]
    too_large = size > _LARGEST_VOCABULARY
    return f"vocab_size={size} is larger than {_LARGEST_VOCABULARY}" if too_large else None


@triton.jit
def _maxima(scores_ptr, maxima_ptr, row_stride, vocab_size, num_parts, PART: tl.constexpr):
    """Grid: rows, parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token_ids = part * PART + tl.arange(0, PART)
    scores = load_scores(scores_ptr + row * row_stride, token_ids, vocab_size)
    tl.store(maxima_ptr + row * num_parts + part, tl.max(order_of(scores), axis=0))


@triton.jit
def _probe(
    scores_ptr, vocab_size, middle, floor, maximum, temperature, min_p,
    COUNTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number or mass of the tokens whose order is at least `middle`.

    Also the smallest of those orders, and the largest order in floor .. middle - 1.
    """
    total = tl.zeros([TILE], tl.int32 if COUNTS else tl.int64)
    above = tl.full([TILE], INT_MAX, tl.int32)
    below = tl.full([TILE], INT_MIN, tl.int32)
    for start in range(0, vocab_size, TILE):
        token_ids = start + tl.arange(0, TILE)
        scores = load_scores(scores_ptr, token_ids, vocab_size)
        order = order_of(scores)
        is_above = (order >= middle) & (token_ids < vocab_size)
        if COUNTS:
            amounts = is_above.to(tl.int32)
        else:
            amounts = (weights_of(scores, maximum, temperature, min_p) * MASS).to(tl.int64)
            amounts = tl.where(is_above, amounts, 0)
        total += amounts
        above = tl.where(is_above, tl.minimum(above, order), above)
        is_below = (order < middle) & (order >= floor) & (token_ids < vocab_size)
        below = tl.where(is_below, tl.maximum(below, order), below)
    return tl.sum(total.to(tl.int64), axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _bisect(
    scores_ptr, vocab_size, wanted, low, high, maximum, temperature, min_p,
    COUNTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
        amount, above, below = _probe(
            scores_ptr, vocab_size, middle, floor, maximum, temperature, min_p, COUNTS, TILE
        )
        enough = amount >= wanted
        low = tl.where(enough, above.to(tl.int64), low)
        high = tl.where(enough, high, below.to(tl.int64))
        beyond = tl.where(enough, beyond, amount)
    return low.to(tl.int32), beyond


@triton.jit
def _nth_id(scores_ptr, vocab_size, order, n, TILE: tl.constexpr):
    """The id of the n-th token (from 1) with this order; INT_MAX if there are fewer."""
    seen = n & 0
    token_id = seen.to(tl.int32) + INT_MAX
    for start in range(0, vocab_size, TILE):
        token_ids = start + tl.arange(0, TILE)
        scores = load_scores(scores_ptr, token_ids, vocab_size)
        equal = ((order_of(scores) == order) & (token_ids < vocab_size)).to(tl.int32)
        count = tl.sum(equal, axis=0)
        if (seen < n) & (seen + count >= n):
            is_it = (equal == 1) & (tl.cumsum(equal, axis=0) + seen == n)
            token_id = tl.min(tl.where(is_it, token_ids, INT_MAX), axis=0)
        seen += count
    return token_id


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def _last_kept(
    scores_ptr,
    maxima_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    last_order_ptr,
    last_id_ptr,
    row_stride,
    vocab_size,
    num_parts,
    scale,
    PARTS: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: rows. Writes the order and the id of the last kept token."""
    row = tl.program_id(0).to(tl.int64)
    temperature, min_p = read_options(temperature_ptr, min_p_ptr, row, scale, MIN_P)
    largest, is_finite = row_maximum(maxima_ptr, row, num_parts, PARTS)
    maximum = score_of(largest)
    scores_ptr += row * row_stride
    order = largest * 0 + INT_MIN
    # How many tokens of the last order are kept; all of them by default.
    ties = (largest * 0).to(tl.int64) + INT_MAX
    is_random = is_finite & (temperature > 0)
    if TOP_K:
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        if is_random & (top_k < vocab_size):
            order, beyond = _bisect(
                scores_ptr, vocab_size, top_k, order, largest, maximum, temperature, min_p,
                True, TILE,
            )  # fmt: skip
            ties = top_k - beyond
    if TOP_P:
        top_p = tl.load(top_p_ptr + row)
        if is_random & (top_p < 1):
            mass, _above, _below = _probe(
                scores_ptr, vocab_size, order + 1, largest, maximum, temperature, min_p, False,
                TILE,
            )  # fmt: skip
            own = mass_of(order, maximum, temperature, min_p)
            total = mass + ties * own
            limit = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            if mass >= limit:
                order, mass = _bisect(
                    scores_ptr, vocab_size, limit, order + 1, largest, maximum, temperature,
                    min_p, False, TILE,
                )  # fmt: skip
                own = mass_of(order, maximum, temperature, min_p)
                ties = ties * 0 + INT_MAX
            if own > 0:
                ties = tl.minimum(ties, (limit - mass + own - 1) // own)
    last_id = largest * 0 + INT_MAX
    if ties < INT_MAX:
        last_id = _nth_id(scores_ptr, vocab_size, order, ties, TILE)
    tl.store(last_order_ptr + row, order)
    tl.store(last_id_ptr + row, last_id)


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def _race(
    scores_ptr,
    maxima_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    last_order_ptr,
    last_id_ptr,
    ids_ptr,
    winners_ptr,
    sums_ptr,
    row_stride,
    vocab_size,
    num_parts,
    scale,
    ahead,
    RANDOM: tl.constexpr,
    MIN_P: tl.constexpr,
    FILTERED: tl.constexpr,
    IDS: tl.constexpr,
    SUMS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid: rows, parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token_ids = part * PART + tl.arange(0, PART)
    scores = load_scores(scores_ptr + row * row_stride, token_ids, vocab_size)
    order = order_of(scores)
    values = order
    if RANDOM or SUMS:
        largest, is_finite = row_maximum(maxima_ptr, row, num_parts, PARTS)
    if SUMS:
        total = tl.sum(weights_of(scores, score_of(largest), 1.0, 0.0), axis=0)
    if RANDOM:
        temperature, min_p = read_options(temperature_ptr, min_p_ptr, row, scale, MIN_P)
        if temperature > 0:
            weights = weights_of(scores, score_of(largest), temperature, min_p)
            if FILTERED:
                last_order = tl.load(last_order_ptr + row)
                last_id = tl.load(last_id_ptr + row)
                kept = (order > last_order) | ((order == last_order) & (token_ids <= last_id))
                weights = tl.where(kept, weights, 0.0)
            if SUMS:
                total = tl.sum(weights, axis=0)
            k0, k1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row) + ahead)
            ids = token_ids
            if IDS:
                ids = tl.load(ids_ptr + token_ids, mask=token_ids < vocab_size, other=0)
            race = weights / exponential(random_bits(ids, k0, k1))
            # A row without likely tokens has no winner: `_winner` checks for -inf.
            runs = is_finite & (race > 0)
            values = tl.where(runs, order_of(race), ORDER_OF_NEGATIVE_INFINITY)
    values = tl.where(token_ids < vocab_size, values, INT_MIN)
    packed = (values.to(tl.int64) << 32) | (token_ids ^ INT_MAX).to(tl.int64)
    tl.store(winners_ptr + row * num_parts + part, tl.max(packed, axis=0))
    if SUMS:
        tl.store(sums_ptr + row * num_parts + part, total)


@triton.jit
def _winner(winners_ptr, token_ids_ptr, num_parts, PARTS: tl.constexpr):
    """Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    packed = tl.load(winners_ptr + row * num_parts + parts, mask=parts < num_parts, other=-(2**63))
    best = tl.max(packed, axis=0)
    value = best >> 32
    is_finite = (value < ORDER_OF_INFINITY) & (value > ORDER_OF_NEGATIVE_INFINITY)
    tl.store(token_ids_ptr + row, tl.where(is_finite, (best & INT_MAX) ^ INT_MAX, -1))


def choose_tokens(scores: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The token of each row of scores [R, V]: [R] int64, -1 where no token can be chosen.

    Reads `temperature`, `seeds`, `positions`, `min_p`, `top_k` and `top_p`.

    Raises:
        ValueError: when temperatures are given without seeds or positions.
    """
    token_ids = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    if scores.shape[0]:
        race = run_race(scores, metadata)
        count, columns = race.num_parts, race.num_columns
        _winner[(len(token_ids),)](race.winners, token_ids, count, PARTS=columns, num_warps=1)
    return token_ids


@dataclass(frozen=True)
class RaceResult:
    """Of each part of each row of scores [R, V].

    Attributes:
        scores: with contiguous rows.
        winners: [R, P] int64, packed.
        maxima: [R, P] int32; undefined for greedy rows without sums.
        sums: [R, P] float32, of the weights that took part; undefined unless asked for.
    """

    scores: torch.Tensor
    winners: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor

    @property
    def num_parts(self) -> int:
        return self.winners.shape[1]

    @property
    def num_columns(self) -> int:
        columns: int = triton.next_power_of_2(self.num_parts)
        return columns


def run_race(
    scores: torch.Tensor,
    m: SamplingMetadata,
    token_ids: torch.Tensor | None = None,
    scale: float = 1.0,
    ahead: int = 0,
    wants_sums: bool = False,
) -> RaceResult:
    """The first three kernels, for at least one row; arguments are those of `choose_drafts`."""
    if m.temperature is not None and (m.seeds is None or m.positions is None):
        raise ValueError("temperature needs seeds and positions")
    num_rows, vocab_size = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    part = min(triton.next_power_of_2(vocab_size), _PART)
    num_parts = triton.cdiv(vocab_size, part)
    grid = (num_rows, num_parts)
    sizes = (scores.stride(0), vocab_size, num_parts)
    num_columns = triton.next_power_of_2(num_parts)
    winners = torch.empty(grid, dtype=torch.int64, device=scores.device)
    # Placeholders for tensors that the kernel does not read.
    maxima = last_order = last_id = sums = winners
    is_filtered = m.temperature is not None and not (m.top_k is None and m.top_p is None)
    if wants_sums:
        sums = torch.empty(grid, dtype=torch.float32, device=scores.device)
    if m.temperature is not None or wants_sums:
        maxima = torch.empty(grid, dtype=torch.int32, device=scores.device)
        _maxima[grid](scores, maxima, *sizes, PART=part, num_warps=4)
    if is_filtered:
        last_order, last_id = torch.empty(2, num_rows, dtype=torch.int32, device=scores.device)
        _last_kept[(num_rows,)](
            scores,
            maxima,
            m.temperature,
            _or(m.min_p, scores),
            _or(m.top_k, scores),
            _or(m.top_p, scores),
            last_order,
            last_id,
            *sizes,
            scale,
            PARTS=num_columns,
            MIN_P=m.min_p is not None,
            TOP_K=m.top_k is not None,
            TOP_P=m.top_p is not None,
            TILE=min(triton.next_power_of_2(vocab_size), _TILE),
            num_warps=16,
        )
    _race[grid](
        scores,
        maxima,
        _or(m.temperature, scores),
        _or(m.min_p, scores),
        _or(m.seeds, scores),
        _or(m.positions, scores),
        last_order,
        last_id,
        _or(token_ids, scores),
        winners,
        sums,
        *sizes,
        scale,
        ahead,
        RANDOM=m.temperature is not None,
        MIN_P=m.min_p is not None,
        FILTERED=is_filtered,
        IDS=token_ids is not None,
        SUMS=wants_sums,
        PARTS=num_columns,
        PART=part,
        num_warps=8,
    )
    return RaceResult(scores, winners, maxima, sums)


def _or(option: torch.Tensor | None, unread: torch.Tensor) -> torch.Tensor:
    """The option, or a placeholder that the kernel does not read."""
    return unread if option is None else option
