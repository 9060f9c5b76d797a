"""How long a step takes, by how many drafts it verifies and makes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

# Relative noise of a step's time.
_NOISE = 0.1
# Relative change of the machine's speed from one step to the next, and of each part of a step on
# its own.
_SPEED_DRIFT, _PART_DRIFT = 0.05, 0.005
# A step's time is capped at this multiple of the expected one, since interruptions do not repeat.
_OUTLIER = 2.0
# What a further row takes, as a share of a step of one row: a guess before measurements, where
# steps wait for weights, and where they compute.
ROW_OF_GPU, ROW_OF_CPU = 0.04, 0.15
# Likewise the cost of making a draft, the error of both slopes, and the deviation of a single
# number of drafts from a straight line.
_MAKING_GUESS, _GUESS_ERROR, _CURVATURE = 0.05, 0.3, 0.1
# Steps of the same numbers, one after the other, whose times are taken together; fewer at first: a
# share of all.
_TOGETHER, _FIRST_TOGETHER_SHARE = 4, 1 / 16
# Lower bound of an estimated step time, as a share of its most expensive part.
_LEAST = 0.02


class StepTimes:
    """Estimated step times of one batch size, by drafts verified and made.

    A step's time is the sum of the two parts, and only sums are measured. A Kalman filter estimates
    all parts together, so that a measurement also corrects parts that are correlated with it. The
    time of a step that makes no drafts counts as verifying.

    Attributes:
        num_steps: that were observed with as many sequences.

    Args:
        levels: ascending numbers of drafts to verify, per sequence: means, which may be fractions.
        choices: ascending numbers of drafts to make.
        num_sequences: in the batch.
        like: times of another batch size, as a first estimate.
        row_guess: what a further row takes, as a share of a step of one row.
        skips_first: whether the first step with a number of drafts only counts if it is fast, since
            it may include allocation or compilation.
    """

    def __init__(
        self,
        levels: Sequence[float],
        choices: Sequence[int],
        num_sequences: int,
        like: StepTimes | None = None,
        *,
        row_guess: float = ROW_OF_GPU,
        skips_first: bool = True,
    ) -> None:
        self._verifying = {n: i for i, n in enumerate(levels)}
        self._making = {n: len(levels) + i for i, n in enumerate(choices)}
        self._constant = self._making[0]  # takes 0 seconds
        self._num_sequences, self._skips_first = num_sequences, skips_first
        base, row = (1 - row_guess, row_guess) if like is None else like._line()
        verifying = [base + row * num_sequences * (1 + n) for n in levels]
        making = [verifying[0] * _MAKING_GUESS * n for n in choices]
        if like is not None:
            making = [like._seconds[j] for j in like._making.values()]
        # Verifying, then making, each number of drafts. In arbitrary units until measured.
        self._seconds: list[float] = verifying + making
        self._least = _LEAST * max(self._seconds)
        self._is_known: bool = like is not None and like._is_known
        self._covariance = _guessed_covariance(levels, choices, self.at(0, 0))
        self._is_measured = False
        self._seen: set[int] = set()
        # The last steps: their parts, their seconds in all, and their number. Steps so far.
        self._parts, self._sum, self._count = (0, self._constant), 0.0, 0
        self.num_steps = 0

    @property
    def is_known(self) -> bool:
        """Whether times are in seconds; before that only their proportions are estimated."""
        return self._is_known

    def at(self, verified: float, made: int) -> float:
        """Time of a step that verifies and makes these numbers of drafts per sequence."""
        i, j = self._find(verified, made)
        return max(self._seconds[i] + self._seconds[j], self._least)

    def between(self, verified: float, made: int) -> float:
        """The same for any number of drafts to verify, on a line between the nearest two."""
        levels = list(self._verifying)
        place = min(max(bisect_right(levels, verified), 1), len(levels) - 1)
        low, high = levels[place - 1], levels[place]
        share = (verified - low) / (high - low)
        return (1 - share) * self.at(low, made) + share * self.at(high, made)

    @property
    def row_seconds(self) -> float:
        """What verifying one more draft of one sequence takes."""
        return self._line()[1]

    def observe(self, verified: float, made: int, seconds: float) -> None:
        """Record a step's time."""
        parts = self._find(verified, made)
        expected = self.at(verified, made)
        is_first = self._skips_first and not self._seen.issuperset(parts)
        self._seen.update(parts)
        if is_first and (not self._is_measured or seconds > expected):
            return
        if not self._is_measured:
            self._scale(seconds / expected)
            self._is_known = self._is_measured = True
            expected = seconds
        if parts != self._parts:
            self._learn()
        self._parts = parts
        self._sum += min(seconds, _OUTLIER * expected)
        self._count += 1
        self.num_steps += 1
        if self._count >= min(_TOGETHER, self.num_steps * _FIRST_TOGETHER_SHARE):
            self._learn()

    def _learn(self) -> None:
        """Correct the estimates by the last steps."""
        if self._count:
            self._correct(*self._parts, self._sum / self._count, self._count)
        self._sum, self._count = 0.0, 0

    def _find(self, verified: float, made: int) -> tuple[int, int]:
        return self._verifying[verified], self._making[made]

    def _line(self) -> tuple[float, float]:
        """Verifying as a constant and a time for each row."""
        most, last = max(self._verifying.items())
        rows = self._num_sequences
        slope = (self._seconds[last] - self._seconds[0]) / (rows * most)
        slope = min(max(slope, 0.0), self._seconds[0] / rows)
        return self._seconds[0] - slope * rows, slope

    def _scale(self, factor: float) -> None:
        self._seconds = [s * factor for s in self._seconds]
        self._least *= factor
        self._covariance = [[c * factor**2 for c in row] for row in self._covariance]

    def _correct(self, i: int, j: int, seconds: float, count: int) -> None:
        """Kalman update: parts `i` and `j` took `seconds` together, the mean of so many steps."""
        error = seconds - self._seconds[i] - self._seconds[j]
        own_drift = count * (_PART_DRIFT * seconds) ** 2
        # Disturbances only slow steps down; a much faster step means a faster machine.
        is_faster = seconds < (self._seconds[i] + self._seconds[j]) / _OUTLIER
        speed = 1.0 if is_faster else _SPEED_DRIFT
        drift = [speed * s for s in self._seconds]
        common, rows = count * (drift[i] + drift[j]), self._covariance
        both = [a + b + common * d for a, b, d in zip(rows[i], rows[j], drift, strict=True)]
        both[i] += own_drift
        both[j] += own_drift if j != self._constant else 0.0
        scale = 1 / (both[i] + both[j] + (_NOISE * seconds) ** 2 / count)
        # In Python: so few numbers take numpy longer, whose code has left the caches.
        for place, row in enumerate(rows):
            more, less = count * drift[place], scale * both[place]
            row[:] = [c + more * d - less * b for c, d, b in zip(row, drift, both, strict=True)]
            row[place] += own_drift if place != self._constant else 0.0
        self._seconds = [s + scale * b * error for s, b in zip(self._seconds, both, strict=True)]
        self._least = _LEAST * max(self._seconds)


def _guessed_covariance(
    levels: Sequence[float], choices: Sequence[int], seconds: float
) -> list[list[float]]:
    """Covariance of the initial estimates: both parts are lines with uncertain slope that bend at
    random on their way; the one for verifying also has an uncertain offset, and another without
    drafts.

    Args:
        seconds: time of a step without drafts.
    """

    def of(is_verifying: bool, same_part: bool, m: float, n: float) -> float:
        if not same_part:
            return 0.0
        slope = _GUESS_ERROR**2 * m * n
        bend = _CURVATURE**2 * (1.0 if is_verifying and m == n == 0 else min(m, n))
        return seconds**2 * (slope + bend + is_verifying)

    places = [(True, float(n)) for n in levels] + [(False, float(n)) for n in choices]
    return [[of(a, a == b, m, n) for b, n in places] for a, m in places]


def batch_bucket(num_sequences: int) -> int:
    """Batch size bucket: exact up to 8, then in steps of about a fifth."""
    return num_sequences if num_sequences <= 8 else round(8 + 4 * math.log2(num_sequences / 8))
