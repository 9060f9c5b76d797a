"""How many drafts each step makes: a fixed number, or the number that pays.

Drafts cost time twice: the draft model makes them, the target verifies them a step later. They
bring tokens where the text is easy to guess. `AdaptiveLength` measures all three while it works
and asks for as many drafts as give the most tokens per second; what it does not know yet or any
more it tries out, for a bounded share of the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
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

# Samples that a cost remembers, and how far one may lie above what is known: a step that the
# machine interrupted says nothing of the next.
_COST_WINDOW = 16
_OUTLIER = 2.0
# Growth of a cost per row, relative to a single row, where it was never measured.
_GUESSED_SLOPE = 0.04


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


@dataclass
class Cost:
    """What one part of a step takes.

    Attributes:
        rows: average number of rows (or sequences) of the steps that it was measured in.
        seconds: their part of the steps' time; a guess before the first measurement.
        count: measurements.
    """

    rows: float
    seconds: float
    count: int = 0


class CostCurve:
    """Seconds as a function of a number of rows, known where it was measured.

    Between measured numbers it is linear, beyond them it grows as such work usually does.
    """

    def __init__(self) -> None:
        self._buckets: list[int] = []  # ascending
        self._costs: list[Cost] = []

    def at(self, rows: float) -> float | None:
        """Seconds for `rows`; None before the first measurement."""
        if not self._costs:
            return None
        after = bisect_left(self._costs, rows, key=lambda cost: cost.rows)
        if after in (0, len(self._costs)):
            nearest = self._costs[min(after, len(self._costs) - 1)]
            return nearest.seconds * _guessed_shape(rows) / _guessed_shape(nearest.rows)
        low, high = self._costs[after - 1], self._costs[after]
        share = (rows - low.rows) / (high.rows - low.rows)
        return low.seconds + share * (high.seconds - low.seconds)

    def find(self, rows: int, guess: float) -> Cost:
        """What is known of steps like one of `rows`, to be corrected; `guess` if nothing is."""
        bucket = _bucket(rows)
        place = bisect_left(self._buckets, bucket)
        if place == len(self._buckets) or self._buckets[place] != bucket:
            known = self.at(rows)
            self._buckets.insert(place, bucket)
            self._costs.insert(place, Cost(rows, guess if known is None else known))
        cost = self._costs[place]
        cost.rows += (rows - cost.rows) / min(cost.count + 1, _COST_WINDOW)
        return cost


def correct(parts: Sequence[Cost], seconds: float) -> None:
    """Learn that `parts` took `seconds` together: what is known the least is corrected the most."""
    expected = sum(part.seconds for part in parts)
    error = min(seconds, _OUTLIER * expected) - expected
    weights = [1 / min(part.count + 1, _COST_WINDOW) for part in parts]
    total = sum(weights)
    if total < 1 and not (error < 0 and min(part.count for part in parts) < 3):
        total = 1.0  # else all of the error: first runs allocate and look things up
    for part, weight in zip(parts, weights, strict=True):
        part.seconds += error * weight / total
        part.count += 1


def _bucket(rows: int) -> int:
    """Numbers up to 8 are told apart, larger ones by a fifth of themselves."""
    return rows if rows <= 8 else round(8 + 4 * math.log2(rows / 8))


def _guessed_shape(rows: float) -> float:
    return 1 + _GUESSED_SLOPE * (rows - 1)


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
        self._verifying = CostCurve()
        self._drafting = {choice: CostCurve() for choice in choices}
        self._credits = dict.fromkeys(choices, 0.0)
        # Asked for in the step before the one that runs, which verifies them, and in that one.
        self._verified = self._asked = 0
        # What the draft model makes in the step that runs.
        self._made = 0

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
        rows = sum(1 + v.num_drafts for v in verifications)
        count = len(verifications)
        guess = seconds / 2 if self._verifying.at(1) is None else self._drafting_at(count, self._made)
        verifying = self._verifying.find(rows, seconds / 2)
        drafting = self._drafting[self._made].find(count, guess)
        correct([verifying, drafting], seconds)

    def _choose(self, sources: Sequence[str], drafts: bool) -> int:
        if self._verifying.at(1) is None:
            return self._choices[-1]
        counts = Counter(sources)
        tokens = {n: self._tokens(counts, n) for n in self._choices}
        seconds = {n: self._seconds(counts, n, drafts) for n in self._choices}
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
        if tries[due] < 0:
            return best
        self._credits[due] = 0.0
        return due

    def _tokens(self, counts: Mapping[str, int], num_drafts: int) -> float:
        """What the next step is expected to yield, drafts and the target's own tokens."""
        return sum(n * (1 + self._of(s).num_accepted(num_drafts)) for s, n in counts.items())

    def _seconds(self, counts: Mapping[str, int], num_drafts: int, drafts: bool) -> float:
        """What making and verifying the drafts is expected to take."""
        rows = sum(n * (1 + self._of(s).num_drafts(num_drafts)) for s, n in counts.items())
        verifying = self._verifying.at(rows)
        assert verifying is not None
        return verifying + self._drafting_at(sum(counts.values()), num_drafts if drafts else 0)

    def _drafting_at(self, num_sequences: int, num_drafts: int) -> float:
        """Measured, or between the nearest numbers of drafts that were."""
        low, below = -1, 0.0
        for n, curve in self._drafting.items():
            seconds = curve.at(num_sequences)
            if seconds is None:
                continue
            if n >= num_drafts:
                return below + (seconds - below) * (num_drafts - low) / (n - low)
            low, below = n, seconds
        return below

    def _of(self, source: str) -> Acceptance:
        if source not in self._acceptance:
            self._acceptance[source] = Acceptance(self._choices[-1])
        return self._acceptance[source]
