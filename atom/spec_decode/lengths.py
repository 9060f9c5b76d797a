"""How many drafts to make in each step, chosen from measurements.

Drafts cost time to make and, in the next step, to verify; how many are accepted depends on the
text. `AdaptiveLength` measures all three and maximises the expected tokens per second. It also
tries other numbers now and then, for a bounded share of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Share of the time that may be lost to tries.
_PROBE_SHARE = 0.01

# Initial acceptance rate of a draft whose predecessors were accepted, and its weight in
# observations. High, because trying drafts costs little.
_FIRST_GUESS, _FIRST_WEIGHT = 0.6, 2
# Observations that an acceptance rate averages over.
_ACCEPTANCE_WINDOW = 48

# Relative noise of a step's time.
_NOISE = 0.1
# Relative change of the machine's speed from one step to the next, and of each part of a step on
# its own.
_SPEED_DRIFT, _PART_DRIFT = 0.05, 0.005
# A step's time is capped at this multiple of the expected one, since interruptions do not repeat.
_OUTLIER = 2.0
# Guesses before measurements, relative to the time of a step with one row: the cost of a further
# row and of making a draft, the error of both slopes, and the deviation of a single number of
# drafts from a straight line.
_ROW_GUESS, _MAKING_GUESS, _GUESS_ERROR, _CURVATURE = 0.04, 0.05, 0.3, 0.1
# Lower bound of an estimated step time, as a share of its most expensive part.
_LEAST = 0.02


@dataclass(frozen=True)
class Verification:
    """The result of verifying one sequence's drafts.

    Attributes:
        source: source of the drafts, also when it made none; None after a step that proposed none.
        num_drafts, num_accepted: drafts verified, and accepted.
    """

    source: str | None
    num_drafts: int
    num_accepted: int


class DraftLength(Protocol):
    """Chooses one number of drafts for all sequences of a step.

    Each step that samples calls `choose`, then `observe`: when it chooses, the acceptance of the
    drafts that it verifies is not known yet.
    """

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        """The number of drafts to make in this step for each sampled sequence.

        Args:
            sources: of each sequence's drafts; at least one.
            drafts: whether the draft model makes drafts, rather than only writing its KV.
        """
        ...

    def follow(self, num_drafts: int) -> None:
        """Another number is made in this step than was chosen: another engine wants more."""
        ...

    def observe(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        """Learn from a finished step.

        Args:
            verifications: of its sampled sequences, for the drafts made in the step before.
            seconds: time of the whole step, drafting included; None when it also computed prompts.
        """
        ...


def spread_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts to choose from: the small ones, some larger ones, and `most`."""
    return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12) if n < most} | {most}))


class StepTimes:
    """Estimated step times of one batch size, by numbers of drafts verified and made.

    A step's time is the sum of the two parts, and only sums are measured. A Kalman filter estimates
    all parts together, so that a measurement also corrects parts that are correlated with it. The
    time of a step that makes no drafts counts as verifying.

    Args:
        choices: ascending numbers of drafts.
        num_sequences: in the batch.
        like: times of another batch size, as a first estimate.
    """

    def __init__(
        self, choices: Sequence[int], num_sequences: int, like: StepTimes | None = None
    ) -> None:
        self._places = {n: i for i, n in enumerate(choices)}
        self._constant = len(choices)  # index of making 0 drafts, which takes 0 seconds
        growth = _ROW_GUESS * num_sequences / (1 + _ROW_GUESS * (num_sequences - 1))
        # Verifying, then making, each number of drafts. In arbitrary units until measured.
        self._seconds = [1 + growth * n for n in choices] + [_MAKING_GUESS * n for n in choices]
        self._is_known = False
        if like is not None:
            self._seconds, self._is_known = list(like._seconds), like._is_known
        self._covariance = _guessed_covariance(choices, self.at(0, 0))
        self._is_measured = False
        self._seen: set[int] = set()

    @property
    def is_known(self) -> bool:
        """Whether times are in seconds; before that only their proportions are estimated."""
        return self._is_known

    def at(self, verified: int, made: int) -> float:
        """Time of a step that verifies and makes these numbers of drafts per sequence."""
        i, j = self._find(verified, made)
        return max(self._seconds[i] + self._seconds[j], _LEAST * max(self._seconds))

    def observe(self, verified: int, made: int, seconds: float) -> None:
        """Record a step's time.

        The first step with a number of drafts only counts if it is fast: it may include allocation
        or compilation.
        """
        parts = self._find(verified, made)
        expected = self.at(verified, made)
        is_first = not self._seen.issuperset(parts)
        self._seen.update(parts)
        if is_first and (not self._is_measured or seconds > expected):
            return
        if not self._is_measured:
            self._scale(seconds / expected)
            self._is_known = self._is_measured = True
            expected = seconds
        self._correct(*parts, min(seconds, _OUTLIER * expected))

    def _find(self, verified: int, made: int) -> tuple[int, int]:
        return self._places[verified], len(self._places) + self._places[made]

    def _scale(self, factor: float) -> None:
        self._seconds = [s * factor for s in self._seconds]
        self._covariance = [[c * factor**2 for c in row] for row in self._covariance]

    def _correct(self, i: int, j: int, seconds: float) -> None:
        """Kalman update: parts `i` and `j` took `seconds` together."""
        error = seconds - self._seconds[i] - self._seconds[j]
        own_drift = (_PART_DRIFT * seconds) ** 2
        # Disturbances only slow steps down; a much faster step means a faster machine.
        is_faster = seconds < (self._seconds[i] + self._seconds[j]) / _OUTLIER
        drift = [(1.0 if is_faster else _SPEED_DRIFT) * s for s in self._seconds]
        columns = zip(self._covariance[i], self._covariance[j], drift, strict=True)
        both = [x + y + d * (drift[i] + drift[j]) for x, y, d in columns]
        both[i] += own_drift
        both[j] += own_drift if j != self._constant else 0.0
        variance = both[i] + both[j] + (_NOISE * seconds) ** 2
        gain = [b / variance for b in both]
        self._seconds = [s + g * error for s, g in zip(self._seconds, gain, strict=True)]
        self._covariance = [
            [c + d * x - g * b for c, x, b in zip(row, drift, both, strict=True)]
            for row, d, g in zip(self._covariance, drift, gain, strict=True)
        ]
        for place, row in enumerate(self._covariance):
            row[place] += own_drift if place != self._constant else 0.0


def _guessed_covariance(choices: Sequence[int], seconds: float) -> list[list[float]]:
    """Covariance of the initial estimates: both parts are lines with uncertain slope; the one for
    verifying also has an uncertain offset.

    Args:
        seconds: time of a step without drafts.
    """

    def of(is_verifying: bool, same_part: bool, m: int, n: int) -> float:
        slope = _GUESS_ERROR**2 * m * n if same_part else 0.0
        height = 1.0 if is_verifying and same_part else 0.0
        own = _CURVATURE**2 * (max(n, 1) if is_verifying else n) if same_part and m == n else 0.0
        return seconds**2 * (slope + height + own)

    places = [(is_verifying, n) for is_verifying in (True, False) for n in choices]
    return [[of(a, a == b, m, n) for b, n in places] for a, m in places]


def _bucket(num_sequences: int) -> int:
    """Batch size bucket: exact up to 8, then in steps of about a fifth."""
    return num_sequences if num_sequences <= 8 else round(8 + 4 * math.log2(num_sequences / 8))


class Acceptance:
    """Acceptance rates of one source's drafts, by position.

    A position is measured only when all before it were accepted, so rates do not depend on the
    number of drafts. Drafts requested but not made count as rejected. With few observations a rate
    is raised by up to a standard deviation: one that is too high corrects itself, one that is too
    low is hardly measured again.
    """

    def __init__(self, most: int) -> None:
        self._rates = [_FIRST_GUESS] * most
        self._counts = [_FIRST_WEIGHT] * most

    def observe(self, asked: int, num_accepted: int) -> None:
        for position in range(min(num_accepted + 1, asked)):
            count = min(self._counts[position] + 1, _ACCEPTANCE_WINDOW)
            kept = float(position < num_accepted)
            self._counts[position] = count
            self._rates[position] += (kept - self._rates[position]) / count

    def num_accepted(self, asked: int) -> float:
        """Expected number of accepted drafts out of `asked`."""
        expected, reached = 0.0, 1.0
        for rate, count in zip(self._rates[:asked], self._counts, strict=False):
            doubt = 1 / math.sqrt(count) - 1 / math.sqrt(_ACCEPTANCE_WINDOW)
            reached *= min(rate + math.sqrt(rate * (1 - rate)) * doubt, 1.0)
            expected += reached
        return expected


class AdaptiveLength:
    """Chooses the number of drafts with the most expected tokens per second.

    The cost of a choice is making drafts now and verifying them in the next step. A measured step
    contains the making of its own choice and the verifying of the one before; where choices change,
    the two are told apart.

    Each number that is not chosen earns a small credit per step and is tried once the credit covers
    the expected loss. So estimates stay fresh, expensive tries are rare, and all tries together
    cost a fixed share of the time. Two tries never follow each other.

    Args:
        choices: ascending numbers of drafts, starting with 0.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        if len(choices) < 2 or choices[0] != 0 or list(choices) != sorted(set(choices)):
            raise ValueError(f"expected ascending numbers of drafts from 0, got {choices}")
        self._choices = tuple(choices)
        self._acceptance: dict[str, Acceptance] = {}
        self._times: dict[int, StepTimes] = {}  # by `_bucket` of the number of sequences
        self._credits = dict.fromkeys(choices, 0.0)
        # Of the current step: drafts requested in the step before, which it verifies; drafts
        # requested in it; those of them that the draft model makes.
        self._verified = self._asked = self._made = 0
        self._is_try = False

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        self._verified, self._asked = self._asked, self._choose(sources, drafts)
        self._made = self._asked if drafts else 0
        return self._asked

    def follow(self, num_drafts: int) -> None:
        self._asked = self._made = num_drafts

    def observe(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        for v in verifications:
            if v.source is not None:
                self._of(v.source).observe(self._verified, v.num_accepted)
        if verifications and seconds is not None:
            self._of_batch(len(verifications)).observe(self._verified, self._made, seconds)

    def _of_batch(self, num_sequences: int) -> StepTimes:
        bucket = _bucket(num_sequences)
        if bucket not in self._times:
            near = min(self._times, key=lambda other: abs(other - bucket), default=bucket)
            self._times[bucket] = StepTimes(self._choices, num_sequences, self._times.get(near))
        return self._times[bucket]

    def _choose(self, sources: Sequence[str], drafts: bool) -> int:
        times = self._of_batch(len(sources))
        if not times.is_known:
            return self._choices[-1]
        counts = Counter(sources)
        tokens = {n: self._tokens(counts, n) for n in self._choices}
        seconds = {n: times.at(n, n if drafts else 0) for n in self._choices}
        best = max(self._choices, key=lambda n: tokens[n] / seconds[n])
        tries: dict[int, float] = {}
        for n in self._choices:
            if n == best:
                self._credits[n] = 0.0
                continue
            self._credits[n] += _PROBE_SHARE / (len(self._choices) - 1) * seconds[best]
            loss = seconds[n] - tokens[n] * seconds[best] / tokens[best]
            tries[n] = self._credits[n] - loss
        due = max(tries, key=lambda n: tries[n])
        if tries[due] < 0 or self._is_try:
            self._is_try = False
            return best
        self._credits[due] = 0.0
        self._is_try = True
        return due

    def _tokens(self, counts: Mapping[str, int], num_drafts: int) -> float:
        """Expected tokens of the next step: accepted drafts plus one token per sequence."""
        return sum(n * (1 + self._of(s).num_accepted(num_drafts)) for s, n in counts.items())

    def _of(self, source: str) -> Acceptance:
        if source not in self._acceptance:
            self._acceptance[source] = Acceptance(self._choices[-1])
        return self._acceptance[source]
