"""Prompt lookup: the tokens that followed the last occurrence of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from atom.graphs.capture import GraphPlan
from atom.kv_cache.base import KVCacheBuilder
from atom.sampling.verify import NO_DRAFT
from atom.spec_decode.base import Lookahead, VerifiedStep


class NgramProposer:
    """Looks the newest tokens of a sequence up in what precedes them; needs no model.

    Args:
        num_speculative_tokens: most drafts per step.
        ngram_max, ngram_min: longest and shortest suffix to look up; the longest that occurs
            wins, and of its occurrences the latest.
    """

    draft_model: nn.Module | None = None
    aux_layer_ids: tuple[int, ...] = ()
    kv_cache_builders: Sequence[KVCacheBuilder] = ()

    def __init__(self, num_speculative_tokens: int, ngram_max: int, ngram_min: int) -> None:
        self.lookahead = Lookahead(num_speculative_tokens)
        self._ngram_max = ngram_max
        self._ngram_min = ngram_min

    def capture(self, plan: GraphPlan) -> None:
        """Nothing runs on the device."""

    def propose(self, step: VerifiedStep) -> torch.Tensor:
        k = step.num_drafts
        if k == 0:
            return step.next_token_ids.new_empty((len(step.histories), 0))
        drafts = np.full((len(step.histories), k), NO_DRAFT, dtype=np.int64)
        for row, (prompt, outputs) in zip(drafts, step.histories, strict=True):
            history = np.array([*prompt, *outputs], dtype=np.int64)
            found = lookup(history, self._ngram_max, self._ngram_min, k)
            row[: len(found)] = found
        return torch.from_numpy(drafts).to(step.next_token_ids.device)


def lookup(history: np.ndarray, ngram_max: int, ngram_min: int, count: int) -> np.ndarray:
    """Up to `count` tokens that followed the latest earlier occurrence of the longest suffix."""
    end = len(history)
    for size in range(min(ngram_max, end - 1), ngram_min - 1, -1):
        suffix = history[end - size :]
        # Candidate starts leave at least one token to propose before the suffix itself ends.
        matches = history[: end - size] == suffix[0]
        for offset in range(1, size):
            matches = matches & (history[offset : end - size + offset] == suffix[offset])
        starts = np.flatnonzero(matches)
        if starts.size:
            first = int(starts[-1]) + size
            found: np.ndarray = history[first : first + count]
            return found
    return history[:0]
