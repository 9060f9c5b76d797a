"""Chooses the draft's vocabulary from the training texts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

# Weight of the target's probabilities relative to the texts' tokens.
_SOFT_WEIGHT = 0.5


def count_tokens(
    token_ids: Iterable[torch.Tensor], vocab_size: int, soft: torch.Tensor | None = None
) -> torch.Tensor:
    """[vocab] float64 token counts of the texts, plus weighted probabilities of the target.

    Args:
        soft: [vocab] summed probabilities over a sample of positions; scaled to the texts' size.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for ids in token_ids:
        counts += torch.bincount(ids.long(), minlength=vocab_size)
    if soft is not None and soft.sum() > 0:
        counts += soft.double() * (_SOFT_WEIGHT * counts.sum() / soft.sum())
    return counts


def soft_counts(final: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[vocab] summed next-token probabilities of final hidden states [N, hidden]."""
    total = torch.zeros(len(head), dtype=torch.float64, device=head.device)
    for rows in torch.split(final, 512):
        total += F.linear(rows, head).softmax(-1).sum(0)
    return total.cpu()


def choose_vocabulary(counts: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64 target token ids, ascending: the most frequent; ties go to low ids.

    Raises:
        ValueError: when there are fewer tokens.
    """
    if not 0 < size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} does not fit a target of {len(counts)} tokens"
        )
    tie_break = torch.linspace(0.5, 0, len(counts), dtype=torch.float64)
    return (counts + tie_break).topk(size).indices.sort().values
