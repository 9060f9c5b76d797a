"""How many drafts each step makes: a fixed number, or the number that pays.

Drafts cost time twice: the draft model makes them, the target verifies them a step later. They
bring tokens where the text is easy to guess. `AdaptiveLength` measures all three while it works
and asks for as many drafts as give the most tokens per second; what it does not know yet or any
more it tries out, for a bounded share of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Share of the time that may be lost to trying out what is not thought best.
_PROBE_SHARE = 0.01

# Acceptance of a draft whose predecessors were accepted, before anything is known, and the
# weight of that in observations. High, because trying costs little and never trying much.
_FIRST_GUESS, _FIRST_WEIGHT = 0.6, 2
# Observations that an acceptance remembers.
_ACCEPTANCE_WINDOW = 48

# A step's time scatters by this share of itself.
_NOISE = 0.1
# From one step to the next the machine's speed changes by this share, and every part of a step's
# time on its own by this share of the step.
_SPEED_DRIFT, _PART_DRIFT = 0.05, 0.005
# A step that takes longer than expected counts as this many times that: a step that the machine
# interrupted says nothing of the next. One that takes less than that part of it is no accident.
_OUTLIER = 2.0
SKIP = 1.0
MODE = 0
RES = False
# What drafts cost before anything is measured, as shares of a step without: verifying one, and
# making one; how far either may be off, and how far each number of drafts from the line.
_ROW_GUESS, _MAKING_GUESS, _GUESS_ERROR, _CURVATURE = 0.04, 0.05, 0.3, 0.1


@dataclass(frozen=True)
class Verification:
    """What became of one sequence's drafts in a step.

    Attributes:
        source: who had been asked for them; None when nobody was.
        num_drafts, num_accepted: verified, and kept.
    """

    source: str | None
    num_drafts: int
    num_accepted: int


class DraftLength(Protocol):
    """Chooses one number of drafts for all sequences of a step.

    Each step that samples calls `choose`, then `observe`: when the number is chosen, what became
    of the drafts that the step verifies is not known yet.
    """

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        """How many drafts to make in this step, for each of its sampled sequences.

        Args:
            sources: by sequence who will be asked, one or more.
            drafts: whether the draft model has to run for any of them; without, it only
                completes its KV.
        """
        ...

    def observe(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        """A step has ended.

        Args:
            verifications: of its sampled sequences: what became of the drafts that it verified,
                which the step before made.
            seconds: what all of the step took, its own drafting included; None when it computed
                prompts too, or when its time says nothing.
        """
        ...


class FixedLength:
    """The same number at every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        return self._num_drafts

    def observe(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        """Nothing is learnt."""


def spread_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts worth telling apart: all the small ones, some of the large ones, `most`."""
    return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12) if n < most} | {most}))


class StepTimes:
    """What the steps of one batch take, by the drafts that they verify and that they make.

    The two parts add up, and only their sums are measured. A Kalman filter estimates all parts
    together, so that a sum which was measured often does not make its parts known, and a try
    corrects whatever it bears on. What never shows in a sum stays as guessed: a constant that
    could move from one part to the other.

    Args:
        choices: numbers of drafts.
        like: a batch not unlike this one; None for guesses.
    """

    def __init__(self, choices: Sequence[int], num_sequences: int, like: StepTimes | None) -> None:
        self._places = {n: i for i, n in enumerate(choices)}
        self._seen: set[int] = set()
        self._is_measured = False
        growth = _ROW_GUESS * num_sequences / (1 + _ROW_GUESS * (num_sequences - 1))
        verifying = [1 + growth * n for n in choices]
        making = [_MAKING_GUESS * n for n in choices]
        self._seconds = verifying + making if like is None else list(like._seconds)
        self._covariance = _guessed_covariance(choices, self._seconds[0])

    @property
    def is_measured(self) -> bool:
        return self._is_measured

    def at(self, verified: int, made: int) -> float:
        """Expected seconds; of an arbitrary unit before the first measurement."""
        i, j = self._find(verified, made)
        # Parts that were never seen together may add up to nonsense.
        return max(self._seconds[i] + self._seconds[j], _NOISE * self._seconds[0])

    def observe(self, verified: int, made: int, seconds: float) -> None:
        i, j = self._find(verified, made)
        expected = self.at(verified, made)
        new = not {i, j} <= self._seen
        self._seen |= {i, j}
        if MODE == 0:
            if new and (not self._is_measured or seconds > SKIP * expected):
                return
            if not self._is_measured or (RES and not new and seconds < expected / _OUTLIER):
                self._scale(seconds / expected)
            self._is_measured = True
            self._correct(i, j, seconds)
        else:
            if not self._is_measured or (RES and not new and seconds < expected / _OUTLIER):
                self._scale(seconds / expected)
            self._is_measured = True
            if not new or seconds < SKIP * expected:
                self._correct(i, j, seconds)

    def _find(self, verified: int, made: int) -> tuple[int, int]:
        return self._places[verified], len(self._places) + self._places[made]

    def _scale(self, factor: float) -> None:
        self._seconds = [s * factor for s in self._seconds]
        self._covariance = [[c * factor**2 for c in row] for row in self._covariance]

    def _correct(self, i: int, j: int, seconds: float) -> None:
        """A step of the parts `i` and `j` took `seconds`."""
        expected = self._seconds[i] + self._seconds[j]
        scale = max(expected, seconds)
        error = min(seconds, _OUTLIER * expected) - expected
        drift = [_SPEED_DRIFT * s for s in self._seconds]
        cov = [[c + x * y for c, y in zip(row, drift)] for row, x in zip(self._covariance, drift)]
        for place, row in enumerate(cov):
            row[place] += (_PART_DRIFT * seconds) ** 2
        both = [x + y for x, y in zip(cov[i], cov[j])]
        variance = both[i] + both[j] + (_NOISE * seconds) ** 2
        self._seconds = [s + b / variance * error for s, b in zip(self._seconds, both)]
        self._covariance = [
            [c - b / variance * x for c, x in zip(row, both)] for row, b in zip(cov, both)
        ]


def _guessed_covariance(choices: Sequence[int], seconds: float) -> list[list[float]]:
    """Of guesses: parts on two lines of unknown slope, the first of unknown height, more or less."""
    places = [(part, n) for part in range(2) for n in choices]
    return [
        [
            seconds**2
            * (
                (_GUESS_ERROR**2 * m * n if a == b else 0)
                + (1 if a == b == 0 else 0)
                + (_CURVATURE**2 * max(n, 1) if (a, m) == (b, n) else 0)
            )
            for b, n in places
        ]
        for a, m in places
    ]


def _bucket(rows: int) -> int:
    """Numbers up to 8 are told apart, larger ones by a fifth of themselves."""
    return rows if rows <= 8 else round(8 + 4 * math.log2(rows / 8))


class Acceptance:
    """What becomes of one source's drafts, by position.

    Each position is measured only where its predecessors were accepted, so that no estimate
    depends on how many drafts were asked for. Drafts asked for and not made count as rejected.
    Few observations are given the benefit of the doubt, a standard deviation of it at first: an
    estimate that is too high corrects itself, one that is too low is hardly looked at again.
    """

    def __init__(self, most: int) -> None:
        self._rates = [_FIRST_GUESS] * most
        self._counts = [_FIRST_WEIGHT] * most
        self._filled = 1.0

    def observe(self, asked: int, num_drafts: int, num_accepted: int) -> None:
        if asked == 0:
            return
        self._filled += (num_drafts / asked - self._filled) / _ACCEPTANCE_WINDOW
        for position in range(min(num_accepted + 1, asked)):
            count = min(self._counts[position] + 1, _ACCEPTANCE_WINDOW)
            kept = float(position < num_accepted)
            self._counts[position] = count
            self._rates[position] += (kept - self._rates[position]) / count

    def num_accepted(self, asked: int) -> float:
        """Drafts that one verification is expected to accept."""
        expected, reached = 0.0, 1.0
        for rate, count in zip(self._rates[:asked], self._counts, strict=False):
            doubt = 1 / math.sqrt(count) - 1 / math.sqrt(_ACCEPTANCE_WINDOW)
            reached *= min(rate + math.sqrt(rate * (1 - rate)) * doubt, 1.0)
            expected += reached
        return expected

    def num_drafts(self, asked: int) -> float:
        """Drafts that the source is expected to make."""
        return asked * self._filled


class AdaptiveLength:
    """Chooses the number of drafts with the highest expected tokens per second.

    Costs depend on the batch: verifying on the rows of a step, drafting on the number of sequences
    and of drafts. Only their sum is measured, and a choice pays for drafting now and for verifying
    in the next step; where choices change, the sums tell the two apart, up to a constant that makes
    no difference. It is fixed by counting what a step without drafts takes as verifying.

    Acceptance belongs to a source. Every number that is not chosen earns a little credit with
    every step, and is tried as soon as the credit covers what trying it is expected to lose. So
    estimates stay fresh, cheap tries are frequent, dear ones rare, and all of them together take
    a fixed share of the time.

    Args:
        choices: ascending numbers of drafts; 0 is among them.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        if len(choices) < 2 or choices[0] != 0 or list(choices) != sorted(set(choices)):
            raise ValueError(f"expected ascending numbers of drafts from 0, got {choices}")
        self._choices = tuple(choices)
        self._acceptance: dict[str, Acceptance] = {}
        self._times: dict[int, StepTimes] = {}
        self._credits = dict.fromkeys(choices, 0.0)
        # Asked for in the step before the one that runs, which verifies them, and in that one.
        self._verified = self._asked = 0
        # What the draft model makes in the step that runs.
        self._made = 0
        self._trying = False

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        self._verified, self._asked = self._asked, self._choose(sources, drafts)
        self._made = self._asked if drafts else 0
        return self._asked

    def observe(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        for v in verifications:
            if v.source is not None:
                self._of(v.source).observe(self._verified, v.num_drafts, v.num_accepted)
        if verifications and seconds is not None:
            self._observe_cost(verifications, seconds)

    def _observe_cost(self, verifications: Sequence[Verification], seconds: float) -> None:
        self._of_batch(len(verifications)).observe(self._verified, self._made, seconds)

    def _of_batch(self, num_sequences: int) -> StepTimes:
        bucket = _bucket(num_sequences)
        if bucket not in self._times:
            near = min(self._times, key=lambda other: abs(other - bucket), default=bucket)
            self._times[bucket] = StepTimes(self._choices, num_sequences, self._times.get(near))
        return self._times[bucket]

    def _choose(self, sources: Sequence[str], drafts: bool) -> int:
        times = self._of_batch(len(sources))
        if not times.is_measured and len(self._times) == 1:
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
        if tries[due] < 0 or self._trying:
            self._trying = False
            return best
        self._credits[due] = 0.0
        self._trying = True
        return due

    def _tokens(self, counts: Mapping[str, int], num_drafts: int) -> float:
        """What the next step is expected to yield, drafts and the target's own tokens."""
        return sum(n * (1 + self._of(s).num_accepted(num_drafts)) for s, n in counts.items())

    def _of(self, source: str) -> Acceptance:
        if source not in self._acceptance:
            self._acceptance[source] = Acceptance(self._choices[-1])
        return self._acceptance[source]
