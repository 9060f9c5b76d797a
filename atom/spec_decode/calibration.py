"""How often drafts are accepted, given how sure their source is of them."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Confidences are told apart by these limits; in each range drafts are first taken to be accepted as
# often as its middle says.
_LIMITS = (0.2, 0.4, 0.6, 0.8, 0.95)
_MIDDLES = (0.1, 0.3, 0.5, 0.7, 0.88, 0.98)
# In place of a range: a draft that was not made, and one that there was none to make.
_UNKNOWN, _NONE = len(_MIDDLES), len(_MIDDLES) + 1

# Acceptance of a draft of which nothing is known, and the weight of first guesses in observations.
# Little, because trying drafts costs little.
_FIRST_GUESS, _FIRST_WEIGHT = 0.6, 2
# Observations that a rate averages over.
_WINDOW = 48
# Weight of what a rate is derived from, against its own observations.
_PRIOR_WEIGHT = 6
# No draft is certain.
_HIGHEST = 0.99
# Observations after which rates are computed anew, and at first as a share of all.
_LASTING, _FIRST_LASTING_SHARE = 8, 1 / 16
# Drafts of sequences that are kept to know what the next ones may be like.
NUM_RECENT = 64

Array = NDArray[np.float64]


class _Mean:
    """A mean over the latest observations, and their number."""

    __slots__ = ("count", "value")

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _WINDOW)
        self.value += (value - self.value) / self.count

    def after(self, prior: float) -> float:
        """The estimate, from a first guess."""
        return (_PRIOR_WEIGHT * prior + self.count * self.value) / (_PRIOR_WEIGHT + self.count)


class Calibration:
    """Acceptance of one source's drafts by confidence and position, from their verifications.

    A draft is judged only when all before it were accepted, so rates do not depend on how many are
    verified. Confidences as a whole are corrected by what they promised and what came, each range
    of confidences by its own drafts, and each position of a range likewise: a few observations
    correct everything a little. While there are few, rates are raised by up to a standard
    deviation: one that is too high corrects itself, one that is too low is hardly measured again.

    Args:
        most: drafts of a sequence; what is known of the last one holds for those beyond.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._accepted = _Mean(_FIRST_GUESS, _FIRST_WEIGHT)
        self._promised = _Mean(_FIRST_GUESS, _FIRST_WEIGHT)
        self._ranges = [_Mean() for _ in _MIDDLES]
        self._cells = [[_Mean() for _ in _MIDDLES] for _ in range(most)]
        # Of the drafts made at each position, verified or not.
        self._made = [_Mean(_FIRST_GUESS, _FIRST_WEIGHT) for _ in range(most)]
        self._recent = [[_UNKNOWN] * most] * NUM_RECENT
        self._num_recent = 0
        # Rates as `_rates` has them, observations so far, and those when the rates were computed.
        self._table: list[list[float]] | None = None
        self._num_observed = self._num_then = 0

    def observe(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Learn from verified drafts of a sequence, of which the first `num_accepted` were kept."""
        for place, confidence in enumerate(confidences[: num_accepted + 1]):
            kept, which = float(place < num_accepted), bisect(_LIMITS, confidence)
            self._accepted.add(kept)
            self._promised.add(_MIDDLES[which])
            self._ranges[which].add(kept)
            self._cells[min(place, self._most - 1)][which].add(kept)
        self._num_observed += 1

    def see(self, confidences: Sequence[float], asked: int) -> list[float]:
        """Learn what drafts are like that were made when so many were asked for.

        Returns:
            For each, the probability that it and all before it are accepted.
        """
        rates = self._rates()
        ranges = [bisect(_LIMITS, confidence) for confidence in confidences]
        # Fewer than asked for means that there were no more.
        seen = [*ranges[:asked], *[_NONE] * (asked - len(ranges))][: self._most]
        self._recent[self._num_recent] = seen + [_UNKNOWN] * (self._most - len(seen))
        self._num_recent = (self._num_recent + 1) % NUM_RECENT
        survivals, reached = [], 1.0
        for place, which in enumerate(ranges):
            known = min(place, self._most - 1)
            rate = rates[known][which]
            self._made[known].add(rate)
            reached *= rate
            survivals.append(reached)
        return survivals

    def recent(self, num_drafts: int) -> Array:
        """[`NUM_RECENT`, num_drafts]: of sequences lately, for each of so many drafts the
        probability that it and all before it are accepted.
        """
        rates = np.array(
            [[*own, mean.value, 0.0] for own, mean in zip(self._rates(), self._made, strict=True)]
        )
        own = np.array(self._recent)[:, :num_drafts]
        return np.cumprod(rates[np.arange(num_drafts), own], axis=1)

    def _rates(self) -> list[list[float]]:
        """By position and range."""
        lasting = min(_LASTING, self._num_observed * _FIRST_LASTING_SHARE)
        if self._table is None or self._num_observed > self._num_then + lasting:
            self._num_then = self._num_observed
            factor = self._accepted.value / self._promised.value
            doubt = 1 / math.sqrt(self._accepted.count) - 1 / math.sqrt(_WINDOW)
            priors = [min(factor * middle, _HIGHEST) for middle in _MIDDLES]
            wholes = [own.after(prior) for own, prior in zip(self._ranges, priors, strict=True)]
            self._table = [
                [
                    _raised(cell.after(whole), doubt)
                    for cell, whole in zip(cells, wholes, strict=True)
                ]
                for cells in self._cells
            ]
        return self._table


def _raised(rate: float, doubt: float) -> float:
    """A rate with the benefit of the doubt, in standard deviations."""
    return min(rate + math.sqrt(rate * (1 - rate)) * doubt, _HIGHEST)
