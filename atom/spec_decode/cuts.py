"""Which drafts a step can verify: as graphs and recorded programs allow, the likeliest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Protocol

import numpy as np

from atom.spec_decode.calibration import NUM_RECENT, Array

# Means of drafts to verify per sequence, besides whole numbers: where few of many are worth it.
_FRACTIONS = (0.125, 0.25, 0.5, 1.5)


class CutRule(Protocol):
    """What steps there are to verify drafts in, and which drafts each would verify.

    Attributes:
        levels: the steps, by the number of drafts per sequence; ascending from 0.
    """

    levels: tuple[float, ...]

    def expected(self, groups: Sequence[tuple[int, Array]]) -> Mapping[float, float]:
        """The expected number of accepted drafts, by level.

        Args:
            groups: numbers of sequences, and for each what drafts of such sequences are like:
                [`NUM_RECENT`, n] probabilities that a draft and all before it are accepted.
        """
        ...

    def gains(self, survivals: Sequence[Sequence[float]]) -> Mapping[float, tuple[int, float]]:
        """How many drafts each level verifies in all, and how many are expected to be accepted.

        Args:
            survivals: of each sequence's drafts, the same probabilities.
        """
        ...

    def cut(self, survivals: Sequence[Sequence[float]], level: float) -> list[int]:
        """The best numbers of drafts to verify of each sequence at one of these levels."""
        ...

    def level_of(self, nums_verified: Sequence[int]) -> float | None:
        """The level of a step that verifies so many drafts of each sequence; None if it is none."""
        ...


class CutByTotal:
    """Steps differ in their drafts in all: the likeliest ones are verified, whose they may be.

    The totals are few, so that steps recur.

    Args:
        choices: numbers of drafts to make.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        inner = {n for n in _FRACTIONS if n < choices[-1]}
        self.levels: tuple[float, ...] = tuple(sorted({*map(float, choices), *inner}))
        self._totals: dict[int, dict[int, float]] = {}

    def expected(self, groups: Sequence[tuple[int, Array]]) -> Mapping[float, float]:
        num_sequences = sum(count for count, _ in groups)
        values = np.concatenate([survivals.ravel() for _, survivals in groups])
        weights = np.repeat([n / NUM_RECENT for n, _ in groups], [s.size for _, s in groups])
        order = np.argsort(-values)
        rows = np.concatenate([[0.0], np.cumsum(weights[order])])
        gains = np.concatenate([[0.0], np.cumsum((values * weights)[order])])
        totals = self._of(num_sequences)
        found = np.interp(list(totals), rows, gains)
        return {
            level: gain
            for (total, level), gain in zip(totals.items(), found.tolist(), strict=True)
            if total <= rows[-1] + 0.5
        }

    def gains(self, survivals: Sequence[Sequence[float]]) -> Mapping[float, tuple[int, float]]:
        values = sorted(chain.from_iterable(survivals), reverse=True)
        sums = [0.0, *accumulate(values)]
        totals = self._of(len(survivals)).items()
        return {level: (total, sums[total]) for total, level in totals if total <= len(values)}

    def cut(self, survivals: Sequence[Sequence[float]], level: float) -> list[int]:
        counts = [len(own) for own in survivals]
        total = round(len(survivals) * level)
        if total < sum(counts):
            # Along a sequence they fall, so those before a draft are verified, too.
            drafts = [
                (-s, place, i) for i, own in enumerate(survivals) for place, s in enumerate(own)
            ]
            counts = [0] * len(survivals)
            for _, _, i in sorted(drafts)[:total]:
                counts[i] += 1
        return counts

    def level_of(self, nums_verified: Sequence[int]) -> float | None:
        return self._of(len(nums_verified)).get(sum(nums_verified))

    def _of(self, num_sequences: int) -> dict[int, float]:
        """Levels by ascending totals; of two for the same total the whole number."""
        if num_sequences not in self._totals:
            fractions = [level for level in self.levels if not level.is_integer()]
            whole = [level for level in self.levels if level.is_integer()]
            totals = {round(num_sequences * level): level for level in (*fractions, *whole)}
            self._totals[num_sequences] = dict(sorted(totals.items()))
        return self._totals[num_sequences]


class CutToLongest:
    """Steps differ in the most drafts of a sequence, to which the others are padded.

    Args:
        levels: numbers of drafts that there are steps for, ascending from 0.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        self.levels: tuple[float, ...] = tuple(map(float, levels))

    def expected(self, groups: Sequence[tuple[int, Array]]) -> Mapping[float, float]:
        longest = max(survivals.shape[1] for _, survivals in groups)
        return {
            level: sum(n * float(s[:, : int(level)].sum(1).mean()) for n, s in groups)
            for level in self.levels
            if level <= longest
        }

    def gains(self, survivals: Sequence[Sequence[float]]) -> Mapping[float, tuple[int, float]]:
        gains = {}
        for level in self.levels:
            kept = [own[: int(level)] for own in survivals]
            gains[level] = sum(map(len, kept)), sum(map(sum, kept))
        return gains

    def cut(self, survivals: Sequence[Sequence[float]], level: float) -> list[int]:
        return [min(len(own), int(level)) for own in survivals]

    def level_of(self, nums_verified: Sequence[int]) -> float | None:
        most = max(nums_verified)
        return next((level for level in self.levels if level >= most), None)
