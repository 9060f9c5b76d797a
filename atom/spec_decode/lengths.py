"""How many drafts each step makes: the number that pays.

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

# The time of a step scatters by this share of itself.
_NOISE = 0.1
# From one step to the next the machine's speed changes by this share, and each part of a step
# by this share of the step on its own.
_SPEED_DRIFT, _PART_DRIFT = 0.05, 0.005
# A step that takes longer than expected counts as this many times that at most: one that the
# machine interrupted says nothing of the next.
_OUTLIER = 2.0
# What is guessed of a step before it is measured, with the time of its first row as the unit: a
# further row, and a draft that is made; how far the growth with each draft may be off, and by
# how much a number of drafts may leave the straight line.
_ROW_GUESS, _MAKING_GUESS, _GUESS_ERROR, _CURVATURE = 0.04, 0.05, 0.3, 0.1
# The least that a step is thought to take, as a share of its dearest part.
_LEAST = 0.02


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


def spread_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts worth telling apart: all the small ones, some of the large ones, `most`."""
    return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12) if n < most} | {most}))


class StepTimes:
    """What the steps of one batch take, by the drafts that they verify and that they make.

    The two parts add up, and only their sums are measured. A Kalman filter estimates all parts
    together: it knows that a sum measured often does not make its parts known, so a try corrects
    whatever it bears on. What a step takes without making drafts is all counted as verifying.

    Args:
        choices: ascending numbers of drafts.
        num_sequences: in the batch.
        like: another batch, whose times are better guesses than none.
    """

    def __init__(
        self, choices: Sequence[int], num_sequences: int, like: StepTimes | None = None
    ) -> None:
        self._places = {n: i for i, n in enumerate(choices)}
        self._constant = len(choices)  # the place of making none: 0 seconds
        growth = _ROW_GUESS * num_sequences / (1 + _ROW_GUESS * (num_sequences - 1))
        # Of verifying, then of making each number of drafts. The unit is arbitrary until known.
        self._seconds = [1 + growth * n for n in choices] + [_MAKING_GUESS * n for n in choices]
        self._is_known = False
        if like is not None:
            self._seconds, self._is_known = list(like._seconds), like._is_known
        self._covariance = _guessed_covariance(choices, self.at(0, 0))
        self._is_measured = False
        self._seen: set[int] = set()

    @property
    def is_known(self) -> bool:
        """Whether times are seconds and not mere proportions."""
        return self._is_known

    def at(self, verified: int, made: int) -> float:
        """What verifying so many drafts of each sequence, and making so many, takes together."""
        i, j = self._find(verified, made)
        return max(self._seconds[i] + self._seconds[j], _LEAST * max(self._seconds))

    def observe(self, verified: int, made: int, seconds: float) -> None:
        """A step took `seconds`.

        The first to verify or to make a number only counts where it is fast: it may have
        allocated, compiled, or looked things up.
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
        """The parts at `i` and `j` took `seconds` together."""
        error = seconds - self._seconds[i] - self._seconds[j]
        own_drift = (_PART_DRIFT * seconds) ** 2
        # Accidents make steps slower. One that is much faster means that the machine is.
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
    """Of guessed times: both parts are lines of unknown slope, verifying one of unknown height.

    Args:
        seconds: of a step without drafts.
    """

    def of(is_verifying: bool, same_part: bool, m: int, n: int) -> float:
        slope = _GUESS_ERROR**2 * m * n if same_part else 0.0
        height = 1.0 if is_verifying and same_part else 0.0
        own = _CURVATURE**2 * (max(n, 1) if is_verifying else n) if same_part and m == n else 0.0
        return seconds**2 * (slope + height + own)

    places = [(is_verifying, n) for is_verifying in (True, False) for n in choices]
    return [[of(a, a == b, m, n) for b, n in places] for a, m in places]


def _bucket(num_sequences: int) -> int:
    """Numbers up to 8 are told apart, larger ones by a fifth of themselves."""
    return num_sequences if num_sequences <= 8 else round(8 + 4 * math.log2(num_sequences / 8))


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

    def observe(self, asked: int, num_accepted: int) -> None:
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


class AdaptiveLength:
    """Chooses the number of drafts with the highest expected tokens per second.

    Costs depend on the number of sequences. A choice pays for making drafts now and for verifying
    them in the next step; each step's time is the sum of one choice's making and the verifying of
    the choice before, so where choices change the two are told apart.

    Acceptance belongs to a source. Every number that is not chosen earns a little credit with
    every step, and is tried as soon as the credit covers what trying it is expected to lose. So
    estimates stay fresh, cheap tries are frequent, dear ones rare, and all of them together take
    a fixed share of the time. No try follows another, so that the best is never only tried.

    Args:
        choices: ascending numbers of drafts; 0 is among them.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        if len(choices) < 2 or choices[0] != 0 or list(choices) != sorted(set(choices)):
            raise ValueError(f"expected ascending numbers of drafts from 0, got {choices}")
        self._choices = tuple(choices)
        self._acceptance: dict[str, Acceptance] = {}
        self._times: dict[int, StepTimes] = {}  # by bucket of the number of sequences
        self._credits = dict.fromkeys(choices, 0.0)
        # Of the step that runs: drafts asked for in the step before, which it verifies; those
        # asked for in it; those that the draft model makes for it.
        self._verified = self._asked = self._made = 0
        self._is_try = False

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        self._verified, self._asked = self._asked, self._choose(sources, drafts)
        self._made = self._asked if drafts else 0
        return self._asked

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
        """What the next step is expected to yield, drafts and the target's own tokens."""
        return sum(n * (1 + self._of(s).num_accepted(num_drafts)) for s, n in counts.items())

    def _of(self, source: str) -> Acceptance:
        if source not in self._acceptance:
            self._acceptance[source] = Acceptance(self._choices[-1])
        return self._acceptance[source]
