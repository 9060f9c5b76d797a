"""From logits to tokens: penalties and masks, filters, and a seeded race for the winner.

A row's token depends on that row alone. Random rows run an exponential race: the token with
the largest weight / E wins, E being independent exponential noise, which draws from the
weights' distribution exactly (the Gumbel-max trick without its second logarithm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from atom.model_ops.metadata import SamplerOutput, SamplingMetadata
from atom.model_ops.noise import exponential_noise, row_keys, token_hashes

# The most likely tokens that a filtered row looks at first; a flat row needs more.
_FIRST_CANDIDATES = 256
_CANDIDATE_GROWTH = 16
# Beyond top_k, so that ties with the last kept token rarely reach the last candidate.
_TIE_ROOM = 64
_LOGPROB_ROWS = 64
_BLOCK = 128
# What a CPU takes at once, so that the working set stays in its cache.
_CPU_CHUNK_ELEMENTS = 2**17


class NoAdmissibleTokenError(ValueError):
    """No token of a row can be chosen: all are masked, or its logits hold NaN or +inf.

    `rows` are the offending rows.
    """

    def __init__(self, rows: list[int]) -> None:
        super().__init__(
            f"rows {rows} of the logits have no token to choose from: every token is masked, or "
            "the logits are not finite; end these sequences with an error"
        )
        self.rows = rows


def sample(logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
    """Choose one token per row.

    The order is: grammar mask, banned tokens, logit bias, repetition, presence and frequency
    penalties; then the argmax of greedy rows, and temperature, min_p, top_k and top_p (over
    what the former two leave) of the others. Equal logits count as ordered by token id, lowest
    first. The logits are not modified.

    Args:
        logits: [R, V], any floating point type.

    Raises:
        NoAdmissibleTokenError: naming the rows where nothing can be chosen.
        ValueError: when an option comes without the tensors that it needs.
    """
    token_ids = _choose(_process(logits, metadata), metadata)
    if bool((token_ids < 0).any()):
        raise NoAdmissibleTokenError(torch.nonzero(token_ids < 0).flatten().tolist())
    if metadata.num_logprobs is None:
        return SamplerOutput(token_ids)
    return SamplerOutput(token_ids, *compute_logprobs(logits, token_ids, metadata.num_logprobs))


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: [R, V], any floating point type.
        token_ids: [R] int64.
        num_logprobs: n; how many of the most likely tokens to report.

    Returns:
        Token ids [R, 1 + n] int64, the given token first, their log-probabilities in float32,
        and the given tokens' ranks [R] int64: 1 + the number of tokens strictly more likely.
    """
    n = min(num_logprobs, logits.shape[-1])
    parts = [
        _logprobs_of_rows(rows.to(torch.float32).log_softmax(-1), chosen[:, None], n)
        for rows, chosen in zip(
            torch.split(logits, _LOGPROB_ROWS), torch.split(token_ids, _LOGPROB_ROWS), strict=True
        )
    ]
    ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs, ranks


def _logprobs_of_rows(
    logprobs: torch.Tensor, chosen: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = chosen
    if n:
        _, top = _most_likely(logprobs, n + _TIE_ROOM)
        ids = torch.cat((chosen, top[:, :n]), dim=-1)
    own = logprobs.gather(-1, chosen)
    return ids, logprobs.gather(-1, ids), 1 + (logprobs > own).sum(-1)


# --- what is added to or taken from the logits ------------------------------------------


def _process(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Logits after masks, bias and penalties: float32 if any of them is on."""
    m = metadata
    steps = (m.grammar_mask, m.banned, m.logit_bias, m.repetition, m.presence, m.frequency)
    if all(step is None for step in steps):
        return logits
    scores = logits.to(torch.float32, copy=True)
    if m.grammar_mask is not None:
        scores.masked_fill_(~_unpack_bits(m.grammar_mask, scores.shape[-1]), -torch.inf)
    if m.banned is not None:
        scores.masked_fill_(m.banned, -torch.inf)
    if m.logit_bias is not None:
        scores.add_(m.logit_bias)
    if m.repetition is not None:
        penalty = torch.where(_seen_tokens(m), m.repetition[:, None], 1.0)
        scores = torch.where(scores > 0, scores / penalty, scores * penalty)
    if m.presence is not None:
        scores.sub_(m.presence[:, None] * (_output_counts(m) > 0))
    if m.frequency is not None:
        scores.sub_(m.frequency[:, None] * _output_counts(m))
    return scores


def _unpack_bits(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    if words.shape[-1] != -(-vocab_size // 32):
        raise ValueError(
            f"grammar_mask holds {words.shape[-1]} words a row; a vocabulary of {vocab_size} "
            f"takes {-(-vocab_size // 32)}"
        )
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _output_counts(metadata: SamplingMetadata) -> torch.Tensor:
    if metadata.output_counts is None:
        raise ValueError("penalties need output_counts")
    return metadata.output_counts


def _seen_tokens(metadata: SamplingMetadata) -> torch.Tensor:
    if metadata.prompt_mask is None:
        raise ValueError("a repetition penalty needs prompt_mask and output_counts")
    return metadata.prompt_mask | (_output_counts(metadata) > 0)


# --- choosing ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _RandomRows:
    """Sampling options of some rows; a filter that no row uses is None."""

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
        """[R] bool: rows whose filters look at the order of the tokens."""
        needed = torch.zeros_like(self.temperature, dtype=torch.bool)
        if self.top_k is not None:
            needed |= self.top_k < vocab_size
        if self.top_p is not None:
            needed |= self.top_p < 1
        return needed


def _choose(scores: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """[R] int64; -1 where no token is admissible."""
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


def _take(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows, without a copy when they are all of them."""
    return scores if rows.numel() == scores.shape[0] else scores[rows]


def _greedy(scores: torch.Tensor) -> torch.Tensor:
    token_ids, best = _first_argmax(scores)
    return token_ids.masked_fill_(~best.isfinite(), -1)


def _race(scores: torch.Tensor, params: _RandomRows) -> torch.Tensor:
    """Race of all tokens, after min_p."""
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
    """Race of the tokens that top_k and top_p leave, which are looked for among the most likely.

    A row is decided when its last kept token is strictly more likely than the last candidate:
    then neither tokens beyond the candidates nor ties at their end matter. Other rows look at
    more candidates, so the result never depends on their number.
    """
    vocab_size = scores.shape[-1]
    if num_candidates is None:
        num_candidates = _first_num_candidates(params, vocab_size)
    values, ids = _most_likely(scores, num_candidates)
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
    """[R, K] bool, true for a prefix of each row's candidates: what the filters leave.

    A weight of 0 (masked, or underflown) is never kept.
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
    """Probabilities relative to the most likely token's, after temperature and min_p.

    The maximum is taken off first, so that a tiny temperature cannot overflow.
    """
    weights = (scores - maximum).div_(params.temperature[:, None]).exp_()
    if params.min_p is not None:
        weights.masked_fill_(weights < params.min_p[:, None], 0.0)
    return weights


def _total_weights(
    scores: torch.Tensor, maximum: torch.Tensor, params: _RandomRows
) -> torch.Tensor:
    """[R] float64. Summed block by block, which torch does alike for any number of rows."""
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


def _most_likely(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
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
