"""Acceptance at random, for benchmarks: drafts cost what they cost, and the text means nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class SyntheticAcceptance:
    """How many drafts of each sequence count as accepted, so that steps bring `length` tokens.

    All but the last of so many are always accepted and the last with the probability that is left,
    as vLLM's schedule has it. The same seed at the same position always decides alike.

    Args:
        length: mean tokens per verified step, the bonus token included.
    """

    def __init__(self, length: float) -> None:
        self._always = int(length) - 1
        self._share = length - int(length)

    def counts(self, seeds: Counts, positions: Counts, num_drafts: Counts) -> Counts:
        """Accepted drafts of S sequences: [S], at most `num_drafts` [S].

        Args:
            positions: [S], of the newest known token.
        """
        bits = _mixed(_mixed(seeds.view(np.uint64)) ^ positions.view(np.uint64))
        more = (bits >> np.uint64(11)) < np.uint64(self._share * 2**53)
        counts: Counts = np.minimum(self._always + more, num_drafts)
        return counts


@dataclass(frozen=True)
class SyntheticCounts:
    """Attributes:
    counts: [S] int64, accepted drafts.
    at: the counts for other positions [S].
    """

    counts: torch.Tensor
    at: Callable[[Counts], Counts]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
