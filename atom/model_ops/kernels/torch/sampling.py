"""Sampling in plain torch: masks, filters, and a seeded exponential race.

In an exponential race the token with the largest weight / E wins, where E is independent
exponential noise. This samples exactly from the weights' distribution (the Gumbel-max trick with
one logarithm less).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.noise import exponential_noise, row_keys, token_hashes

# The number of most likely tokens that a filtered row sorts first; flat rows need more.
_FIRST_CANDIDATES = 256
_CANDIDATE_GROWTH = 16
# Extra candidates, so that ties with the last kept token rarely exceed them.
_TIE_ROOM = 64
_BLOCK = 128
# Chunk size on a CPU, so that the working set fits in its cache.
_CPU_CHUNK_ELEMENTS = 2**17


def mask_tokens(scores: torch.Tensor, words: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Set the scores [R, V] float32 of tokens that a mask does not allow to -inf, in place.

    Args:
        words: [G, ceil(V / 32)] int32; bit t % 32 of word t // 32 allows token t.
        rows: [G] int64, different rows of the scores; None when G is R.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[:, :, None] >> shifts) & 1
    refused = bits.flatten(1)[:, : scores.shape[-1]] == 0
    if rows is None:
        scores.masked_fill_(refused, -torch.inf)
    else:
        scores[rows] = scores[rows].masked_fill_(refused, -torch.inf)


@dataclass(frozen=True)
class _RandomRows:
    """Sampling options of some rows; None for a filter that no row uses."""

    temperature: torch.Tensor
    keys: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None

    def select(self, rows: torch.Tensor | slice) -> _RandomRows:
        return _RandomRows(
            self.temperature[rows],
            self.keys[rows],
            None if self.top_k is None else self.top_k[rows],
            None if self.top_p is None else self.top_p[rows],
            None if self.min_p is None else self.min_p[rows],
        )

    def needs_order(self, vocab_size: int) -> torch.Tensor:
        """[R] bool: rows whose filters depend on the order of the tokens."""
        needed = torch.zeros_like(self.temperature, dtype=torch.bool)
        if self.top_k is not None:
            needed |= self.top_k < vocab_size
        if self.top_p is not None:
            needed |= self.top_p < 1
        return needed


def choose_tokens(scores: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The token of each row of scores [R, V]: [R] int64, -1 where no token can be chosen.

    Reads `temperature`, `seeds`, `positions`, `min_p`, `top_k` and `top_p`.

    Raises:
        ValueError: when temperatures are given without seeds or positions.
    """
    m = metadata
    if m.temperature is None:
        return _greedy(scores)
    if m.seeds is None or m.positions is None:
        raise ValueError("temperature needs seeds and positions")
    params = _RandomRows(m.temperature, row_keys(m.seeds, m.positions), m.top_k, m.top_p, m.min_p)
    is_random = m.temperature > 0
    ordered = is_random & params.needs_order(scores.shape[-1])
    token_ids = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    rows = torch.nonzero(~is_random).flatten()
    if rows.numel():
        token_ids[rows] = _greedy(_take(scores, rows))
    rows = torch.nonzero(is_random & ~ordered).flatten()
    if rows.numel():
        token_ids[rows] = _race(_take(scores, rows), params.select(rows))
    rows = torch.nonzero(ordered).flatten()
    if rows.numel():
        token_ids[rows] = _ordered_race(_take(scores, rows).to(torch.float32), params.select(rows))
    return token_ids


def argmax(scores: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The token whose score is the largest of each row of scores [R, V]: [R] int64. NaN is largest,
    and of equal scores the first.

    Args:
        token_ids: [V] int64, the token of each score; None if these are their places.
    """
    largest = scores.argmax(dim=-1)
    return largest if token_ids is None else token_ids[largest]


def largest_pair(scores: torch.Tensor, start: int) -> torch.Tensor:
    """The largest of each row of scores [R, V] float32, and its place plus `start`: [R, 2] int32,
    the first as its bits. As `argmax` has it.
    """
    place = scores.argmax(dim=-1, keepdim=True)
    bits = scores.gather(-1, place).view(torch.int32)
    return torch.cat((bits, (place + start).int()), dim=-1)


def largest_of_pairs(
    pairs: torch.Tensor, token_ids: torch.Tensor | None, needs_finite: bool
) -> torch.Tensor:
    """Of what `largest_pair` found on N ranks, [N, R, 2] int32, the largest of each row: its place,
    [R] int64. Of equal ones that of the first rank.

    Args:
        token_ids: as for `argmax`.
        needs_finite: whether there is -1 where the largest is not finite.
    """
    scores = pairs[..., 0].view(torch.float32)
    rank = scores.argmax(dim=0, keepdim=True)
    place = pairs[..., 1].gather(0, rank)[0].long()
    if token_ids is not None:
        place = token_ids[place]
    if needs_finite:
        place = place.masked_fill(~scores.gather(0, rank)[0].isfinite(), -1)
    return place


def _take(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The selected rows; not copied if they are all rows."""
    return scores if rows.numel() == scores.shape[0] else scores[rows]


def _greedy(scores: torch.Tensor) -> torch.Tensor:
    token_ids, best = _first_argmax(scores)
    return token_ids.masked_fill_(~best.isfinite(), -1)


def _race(scores: torch.Tensor, params: _RandomRows) -> torch.Tensor:
    """Exponential race of all tokens, after min_p."""
    vocab_size = scores.shape[-1]
    token_ids = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    hashes = token_hashes(vocab_size, scores.device)
    for some in _row_chunks(scores):
        part = scores[some].to(torch.float32)
        weights = _weights(part, part.amax(-1, keepdim=True), params.select(some))
        race = weights.div_(exponential_noise(params.keys[some], hashes))
        winners, best = _first_argmax(race)
        token_ids[some] = winners.masked_fill_(~(best > 0), -1)
    return token_ids


def _ordered_race(
    scores: torch.Tensor, params: _RandomRows, num_candidates: int | None = None
) -> torch.Tensor:
    """Exponential race of the tokens that top_k and top_p keep, among the most likely candidates.

    A row is final when its last kept token is strictly more likely than its last candidate: then
    neither further tokens nor ties matter. Other rows are repeated with more candidates, so the
    result does not depend on their number.
    """
    vocab_size = scores.shape[-1]
    if num_candidates is None:
        num_candidates = _first_num_candidates(params, vocab_size)
    values, ids = most_likely(scores, num_candidates)
    weights = _weights(values, values[:, :1], params)
    kept = _kept(weights, scores, values[:, :1], params)
    hashes = token_hashes(vocab_size, scores.device)[ids]
    race = torch.where(kept, weights / exponential_noise(params.keys, hashes), 0.0)
    best = race.amax(-1, keepdim=True)
    winners = torch.where(race == best, ids, vocab_size).amin(-1)
    token_ids = winners.masked_fill_(~(best.squeeze(-1) > 0), -1)
    if values.shape[-1] == vocab_size:
        return token_ids
    last_kept = values.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    undecided = torch.nonzero(~(last_kept > values[:, -1:]).squeeze(-1)).flatten()
    if undecided.numel():
        token_ids[undecided] = _ordered_race(
            scores[undecided], params.select(undecided), num_candidates * _CANDIDATE_GROWTH
        )
    return token_ids


def _first_num_candidates(params: _RandomRows, vocab_size: int) -> int:
    if params.top_k is None:
        return _FIRST_CANDIDATES
    limits = params.top_k[params.top_k < vocab_size]
    largest = int(limits.max()) + _TIE_ROOM if limits.numel() else 0
    all_limited = limits.numel() == params.top_k.numel()
    return largest if all_limited else max(largest, _FIRST_CANDIDATES)


def _kept(
    weights: torch.Tensor, scores: torch.Tensor, maximum: torch.Tensor, params: _RandomRows
) -> torch.Tensor:
    """[R, K] bool, a prefix of each row's candidates: those that the filters keep.

    A weight of 0 (masked or underflown) is never kept.
    """
    kept = weights > 0
    vocab_size = scores.shape[-1]
    if params.top_k is not None:
        rank = torch.arange(weights.shape[-1], device=weights.device)
        kept &= rank < params.top_k[:, None]
    if params.top_p is None:
        return kept
    mass = weights.to(torch.float64).masked_fill_(~kept, 0.0)
    total = mass.sum(-1)
    unlimited = params.top_p < 1
    if params.top_k is not None:
        unlimited &= params.top_k >= vocab_size
    rows = torch.nonzero(unlimited).flatten()
    if rows.numel():
        total[rows] = _total_weights(_take(scores, rows), maximum[rows], params.select(rows))
    before = mass.cumsum(-1).sub_(mass)
    top_p = params.top_p.to(torch.float64)
    return kept & ((before < (top_p * total)[:, None]) | (top_p >= 1)[:, None])


def _weights(scores: torch.Tensor, maximum: torch.Tensor, params: _RandomRows) -> torch.Tensor:
    """Probabilities relative to the most likely token, after temperature and min_p.

    The maximum is subtracted first, so that a tiny temperature cannot overflow.
    """
    weights = (scores - maximum).div_(params.temperature[:, None]).exp_()
    if params.min_p is not None:
        weights.masked_fill_(weights < params.min_p[:, None], 0.0)
    return weights


def _total_weights(
    scores: torch.Tensor, maximum: torch.Tensor, params: _RandomRows
) -> torch.Tensor:
    """[R] float64, summed in blocks, so that the result does not depend on the number of rows."""
    totals = []
    for some in _row_chunks(scores):
        weights = _weights(scores[some], maximum[some], params.select(some))
        end = weights.shape[-1] - weights.shape[-1] % _BLOCK
        blocks = weights[:, :end].view(weights.shape[0], end // _BLOCK, _BLOCK).sum(-1)
        rest = weights[:, end:].sum(-1, dtype=torch.float64)
        totals.append(blocks.sum(-1, dtype=torch.float64) + rest)
    return torch.cat(totals)


def _row_chunks(scores: torch.Tensor) -> Iterator[slice]:
    rows, width = scores.shape
    step = rows if scores.is_cuda else max(1, _CPU_CHUNK_ELEMENTS // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest scores of each row and their ids, by score, then by lowest id."""
    if count >= scores.shape[-1]:
        values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values, ids
    ids = scores.topk(count, dim=-1, sorted=False).indices.sort(-1).values
    values, order = torch.sort(scores.gather(-1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _first_argmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Id and value of each row's largest entry, the lowest id among equals.

    Block maxima first: `amax` is vectorised where `argmax` is not.
    """
    rows, width = scores.shape
    blocks = width // _BLOCK
    if width % _BLOCK or blocks < 2:
        best, token_ids = scores.max(-1)
        return token_ids, best
    split = scores.view(rows, blocks, _BLOCK)
    best, block = split.amax(-1).max(-1)
    inner = split[torch.arange(rows, device=scores.device), block].max(-1).indices
    return block * _BLOCK + inner, best
