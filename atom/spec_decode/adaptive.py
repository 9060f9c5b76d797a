"""A number of drafts that pays: chosen from measured costs and measured acceptance.

Drafts cost time twice: the draft model makes them, the target verifies them. They bring tokens
where the text is easy to guess. `AdaptiveLength` measures all three while it works and asks for
as many drafts as give the most tokens per second; what it does not know yet or any more it tries
out, for a bounded share of the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from atom.spec_decode.base import Verification

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


def spread_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts worth telling apart: all the small ones, some of the large ones, `most`."""
    return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12) if n < most} | {most}))


class CostCurve:
    """Seconds as a function of a number of rows, known where it was measured.

    Between measured numbers it is linear, beyond them it grows as such work usually does.
    """

    def __init__(self) -> None:
        # Ascending; for each bucket the average rows and seconds of its samples.
        self._buckets: list[int] = []
        self._rows: list[float] = []
        self._seconds: list[float] = []
        self._counts: list[int] = []

    def observe(self, rows: int, seconds: float) -> None:
        bucket = _bucket(rows)
        place = bisect_left(self._buckets, bucket)
        if place == len(self._buckets) or self._buckets[place] != bucket:
            self._buckets.insert(place, bucket)
            self._rows.insert(place, rows)
            self._seconds.insert(place, seconds)
            self._counts.insert(place, 1)
            return
        known = self._seconds[place]
        count = self._counts[place] + 1
        weight = 1 / min(count, _COST_WINDOW)
        if count <= 3 and seconds < known:
            weight = 1.0  # first runs allocate and look things up
        self._seconds[place] += weight * (min(seconds, _OUTLIER * known) - known)
        self._rows[place] += weight * (rows - self._rows[place])
        self._counts[place] = count

    def at(self, rows: float) -> float | None:
        """Seconds for `rows`; None before the first measurement."""
        if not self._rows:
            return None
        after = bisect_left(self._rows, rows)
        if after in (0, len(self._rows)):
            nearest = min(after, len(self._rows) - 1)
            shape = _guessed_shape(rows) / _guessed_shape(self._rows[nearest])
            return self._seconds[nearest] * shape
        share = (rows - self._rows[after - 1]) / (self._rows[after] - self._rows[after - 1])
        return self._seconds[after - 1] + share * (self._seconds[after] - self._seconds[after - 1])


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

    Costs depend on the batch: the target's on the rows of a step, the draft's on the number of
    sequences and of drafts. Acceptance belongs to a source. Every number that is not chosen earns
    a little credit with every step, and is tried as soon as the credit covers what trying it is
    expected to lose. So estimates stay fresh, cheap tries are frequent, dear ones rare, and all of
    them together take a fixed share of the time.

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
        self._asked = 0

    def observe_step(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        for v in verifications:
            if v.source is not None:
                self._of(v.source).observe(self._asked, v.num_drafts, v.num_accepted)
        if seconds is not None:
            self._verifying.observe(sum(1 + v.num_drafts for v in verifications), seconds)

    def observe_drafting(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        self._drafting[num_drafts].observe(num_sequences, seconds)

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        self._asked = self._choose(sources, drafts)
        return self._asked

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
        return verifying + self._draft_seconds(sum(counts.values()), num_drafts if drafts else 0)

    def _draft_seconds(self, num_sequences: int, num_drafts: int) -> float:
        """Measured, or in proportion to the nearest number of drafts that was."""
        measured = self._drafting[num_drafts].at(num_sequences)
        if measured is not None:
            return measured
        for n in sorted(self._choices[1:], key=lambda n: abs(n - num_drafts)):
            known = self._drafting[n].at(num_sequences)
            if known is not None:
                return known * num_drafts / n
        return 0.0

    def _of(self, source: str) -> Acceptance:
        if source not in self._acceptance:
            self._acceptance[source] = Acceptance(self._choices[-1])
        return self._acceptance[source]
