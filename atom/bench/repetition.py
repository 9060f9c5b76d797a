"""How much a text repeats itself, by which texts that drafts find easy are told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def repeated_bigram_share(token_ids: Sequence[int]) -> float:
    """The share of bigrams that occurred before, in [0, 1]."""
    bigrams = list(itertools.pairwise(token_ids))
    return 1 - len(set(bigrams)) / len(bigrams) if bigrams else 0.0
