"""Which token a draft proposes, in plain torch."""

from __future__ import annotations

import torch

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.noise import exponential_noise, hash_tokens, row_keys, token_hashes


def choose_drafts(
    scores: torch.Tensor,
    metadata: SamplingMetadata,
    token_ids: torch.Tensor | None,
    scale: float,
    ahead: int,
    confident: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A draft for each row of a draft model's scores [R, V].

    The winner of the race that `choose_tokens` runs for the target at the draft's position: with
    the same noise, two similar distributions mostly have the same winner. Greedy rows take the
    argmax. Every row gets some token, also one without a finite score. No host sync.

    Args:
        metadata: options of the rows; all are greedy without temperatures.
        token_ids: [V] int32, the target's token of each score; None if these are the same. They
            ascend, as do ties.
        scale: of the temperatures.
        ahead: how far the drafts' positions are beyond `metadata.positions`.
        confident: whether to compute confidences.

    Returns:
        [R] int64, tokens of the target, and [R] float32: the probabilities that the draft model
        gives them, after temperature (1 where greedy), min_p, top_k and top_p.

    Raises:
        ValueError: when temperatures are given without seeds or positions.
    """
    scores = scores.float()
    best, winners = scores.max(-1)
    temperature = torch.ones_like(best)
    is_random = torch.zeros_like(best, dtype=torch.bool)
    if metadata.temperature is not None:
        is_random = (metadata.temperature > 0) & best.isfinite()
        least = torch.finfo(torch.float32).tiny
        temperature = (metadata.temperature * scale).clamp(min=least).where(is_random, temperature)
    weights = ((scores - best[:, None]) / temperature[:, None]).exp()
    if metadata.temperature is not None:
        if metadata.seeds is None or metadata.positions is None:
            raise ValueError("temperature needs seeds and positions")
        weights = torch.where(is_random[:, None], filtered(scores, weights, metadata), weights)
        keys = row_keys(metadata.seeds, metadata.positions + ahead)
        size = scores.shape[-1]
        noise = exponential_noise(keys, _hashes(token_ids, size, scores.device))
        winners = (weights / noise).argmax(-1).where(is_random, winners)
    confidences = None
    if confident:
        confidences = weights.gather(-1, winners[:, None])[:, 0] / weights.sum(-1)
        confidences = confidences.nan_to_num(0.0)
    return winners if token_ids is None else token_ids[winners].long(), confidences


def _hashes(token_ids: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
    if token_ids is None:
        return token_hashes(size, device)
    return hash_tokens(token_ids)


def filtered(
    scores: torch.Tensor, weights: torch.Tensor, metadata: SamplingMetadata
) -> torch.Tensor:
    """The weights [R, V] of the tokens that min_p, top_k and top_p keep; 0 for others.

    Args:
        weights: probabilities relative to each row's most likely token.
    """
    if metadata.min_p is not None:
        weights = weights.masked_fill(weights < metadata.min_p[:, None], 0.0)
    if metadata.top_k is None and metadata.top_p is None:
        return weights
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    mass = weights.gather(-1, order).double()
    if metadata.top_k is not None:
        ranks = torch.arange(scores.shape[-1], device=scores.device)
        mass = mass.masked_fill(ranks >= metadata.top_k[:, None], 0.0)
    kept = mass > 0
    if metadata.top_p is not None:
        before = mass.cumsum(-1) - mass
        limit = metadata.top_p[:, None].double() * mass.sum(-1, keepdim=True)
        kept &= (before < limit) | (metadata.top_p >= 1)[:, None]
    return weights.where(torch.zeros_like(kept).scatter_(-1, order, kept), 0.0)
