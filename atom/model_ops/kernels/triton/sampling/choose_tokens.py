"""Samples tokens in a fixed sequence of launches, without host syncs.

All but the last step split a row over the vocabulary:

1. the maximum score of each part, and for top_k and top_p of each group of neighbouring tokens;
2. for rows with top_k or top_p, the last kept token, in at most three passes for each of them
  (`filter_tokens`);
3. the winner of each part's exponential race, packed into an integer: the order of its value in the
  upper bits, the reversed token id in the lower ones;
4. the winner of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.triton.sampling.filter_tokens import GROUP, last_kept
from atom.model_ops.kernels.triton.sampling.scores import (
    INT_MAX,
    INT_MIN,
    ORDER_OF_INFINITY,
    ORDER_OF_NEGATIVE_INFINITY,
    load_scores,
    order_of,
    read_options,
    row_maximum,
    score_of,
    weights_of,
)
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

# The sampling noise of `atom.model_ops.noise` inside Triton kernels, identical to the bit.


@triton.jit
def _mix(h, key):
    h ^= h >> 16
    h = h * 0x21F0AAAD + key
    h ^= h >> 15
    h = h * 0xD35A2D97
    return h ^ (h >> 15)


@triton.jit
def _row_key(
    w0, w1, w2, w3, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr
):
    zero = w0 & 0
    mixed = _mix(w0 ^ C0, zero) + _mix(w1 ^ C1, zero) + _mix(w2 ^ C2, zero) + _mix(w3 ^ C3, zero)
    return _mix(mixed, zero)


@triton.jit
def row_keys(seed, position):
    """The two uint32 keys of a row, from int64."""
    w0 = seed.to(tl.uint32)
    w1 = (seed >> 32).to(tl.uint32)
    w2 = position.to(tl.uint32)
    w3 = (position >> 32).to(tl.uint32)
    k0 = _row_key(w0, w1, w2, w3, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    k1 = _row_key(w0, w1, w2, w3, 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
    return k0, k1


@triton.jit
def random_bits(token_ids, k0, k1):
    """uint32 random bits of int32 token ids, in the row of these keys."""
    hashes = token_ids.to(tl.uint32) * 0x9E3779B1
    hashes = _mix(hashes, hashes & 0)
    return _mix(hashes ^ k0, k1)


@triton.jit
def exponential(bits):
    """Standard exponential variates from uint32 bits, float32."""
    v = (bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * (2.0**-31) + (2.0**-32)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    # log1p by log: cancels the rounding error of u.
    u = 1.0 - v
    return tl.where(u == 1.0, v, v * (tl.log(u) / tl.where(u == 1.0, -1.0, u - 1.0)))


# So that the sum of all masses fits in int64.
_LARGEST_VOCABULARY = 2**18
_PART = 4096  # tokens per program when a row is split
# Threads with 8 tokens each: with more, noise takes so many registers that half as many groups fit.
_RACE_WARPS = 8 if current_platform().kind == "rocm" else 16
# Rows of gathered tensors, whose alignment depends on the number of rows.
_OPTIONS = ["temperature_ptr", "min_p_ptr", "last_order_ptr", "last_id_ptr"]


def refuses(query: OpQuery) -> str | None:
    """Why this vocabulary is not supported; None if it is."""
    size = query.shape["vocab_size"]
    too_large = size > _LARGEST_VOCABULARY
    return f"vocab_size={size} is larger than {_LARGEST_VOCABULARY}" if too_large else None


@triton.jit
def _maxima(
    scores_ptr, maxima_ptr, groups_ptr, row_stride, vocab_size, num_parts,
    PART: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: rows, parts of a row. The maximum of each part, and of each group if asked for."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token_ids = part * PART + tl.arange(0, PART)
    scores = load_scores(scores_ptr + row * row_stride, token_ids, vocab_size)
    order = order_of(scores)
    if groups_ptr is not None:
        GROUPS: tl.constexpr = PART // GROUP
        order = tl.max(tl.reshape(order, [GROUPS, GROUP]), axis=1)
        places = (row * num_parts + part) * GROUPS + tl.arange(0, GROUPS)
        tl.store(groups_ptr + places, order)
    tl.store(maxima_ptr + row * num_parts + part, tl.max(order, axis=0))


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
    best = tl.max(values, axis=0)
    winner = tl.min(tl.where(values == best, token_ids, INT_MAX), axis=0)
    packed = (best.to(tl.int64) << 32) | (winner ^ INT_MAX).to(tl.int64)
    tl.store(winners_ptr + row * num_parts + part, packed)
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
    """The first three steps, for at least one row; arguments are those of `choose_drafts`."""
    if m.temperature is not None and (m.seeds is None or m.positions is None):
        raise ValueError("temperature needs seeds and positions")
    num_rows, vocab_size = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    part = min(triton.next_power_of_2(vocab_size), _PART)
    group = min(part, GROUP)
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
        groups = maxima.new_empty(num_rows, num_parts * (part // group)) if is_filtered else None
        _maxima[grid](scores, maxima, groups, *sizes, PART=part, GROUP=group, num_warps=4)
        if groups is not None:
            last_order, last_id = last_kept(scores, maxima, groups, part, m, scale)
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
        num_warps=_RACE_WARPS,
    )
    return RaceResult(scores, winners, maxima, sums)


def _or(option: torch.Tensor | None, unread: torch.Tensor) -> torch.Tensor:
    """The option, or a placeholder that the kernel does not read."""
    return unread if option is None else option
