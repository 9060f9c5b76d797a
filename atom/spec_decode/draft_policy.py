"""How many drafts a step makes, and the next one verifies: a fixed number, or what pays.

Drafts cost time to make and, in the next step, to verify; how many are accepted depends on the
text. `AdaptiveDrafts` measures all three and chooses the number with the most tokens per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from atom.spec_decode.step_times import ROW_OF_GPU, StepTimes, batch_bucket

# Share of the time that tries of other numbers may lose.
_TRIES = 0.01
# Steps for which a plan holds, which costs a hundredth of a small model's step; at first a share of
# the steps so far, since little is known.
_LASTING, _FIRST_LASTING_SHARE = 16, 1 / 8
# Steps at rest, one after the other: at most as many as a try waits for, or a change of the text
# would be noticed late.
_MOST_RESTING = 31
# Where steps are recorded, those with a number of sequences that make no drafts at first: what they
# take is what all else is compared with, and the first ones come behind prompts.
_FIRST_STEPS = 3
# What drafts for several sequences take more than was measured where steps are recorded: as
# sequences come and go, and lookups find more or less, some steps have shapes that are recorded
# first.
_NEW_SHAPES = 0.1
# Verifications over which acceptance is averaged, and as how many the position before one counts
# where that one was rarely seen.
_WINDOW, _PRIOR = 128, 4
# Acceptance of a first draft before any was verified: what a draft that fits its target has.
_FIRST_ACCEPTED = 0.7
# Recorded steps verify totals of half a draft a sequence, one draft, and so on, until others were
# wanted so often that recording them pays: a few drafts more are worth a tenth of that.
_RECURRING = 8
# Numbers of drafts to verify per sequence whose times are told apart, besides those of whole ones.
_FRACTIONS = (0.125, 0.25, 0.5, 1.5)


def spread_numbers(most: int) -> tuple[int, ...]:
    """Numbers of drafts to choose from: the small ones, some larger ones, and `most`."""
    return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12) if n < most} | {most}))


class DraftNumbers(msgspec.Struct, frozen=True):
    """How many drafts a step makes.

    Attributes:
        made: by the proposer, of each sampled sequence.
        asked: of a sequence that the proposer drafts for, with those that the lookup adds.
        most: of a sequence whose drafts are looked up.
        least: these end before the probability that all of them are right falls below it.
    """

    made: int = 0
    asked: int = 0
    most: int = 0
    least: float = 0.0


class Candidates(msgspec.Struct, frozen=True):
    """A sequence's drafts, before their number is made to fit.

    Attributes:
        source: of the drafts, also when it made none.
        count: of them.
        expected: accepted ones by the word of a lookup; 0 for those of the proposer.
    """

    source: str
    count: int
    expected: float = 0.0


class Verification(msgspec.Struct, frozen=True):
    """The result of verifying one sequence's drafts.

    Attributes:
        source: of the drafts; None after a step that proposed none.
    """

    source: str | None
    num_drafts: int
    num_accepted: int


class DraftPolicy(Protocol):
    """Chooses numbers of drafts. Each step calls `begin`; unless it is at rest, `choose`, `fit` and
    `observe`, too. Where steps overlap the next one chooses before this one fits.

    Attributes:
        is_resting: nothing is drafted or looked up in this step, since no drafts paid lately.
    """

    is_resting: bool

    def begin(self, num_sequences: int, *, is_steady: bool) -> None:
        """A step begins.

        Args:
            num_sequences: that it samples and that want drafts.
            is_steady: it has no other sequences, and none that starts.
        """
        ...

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        """The numbers of a step that samples some sequences that want drafts.

        Args:
            num_looked_up: of them, those whose drafts a lookup has found.
        """
        ...

    def fit(self, numbers: DraftNumbers, made: Sequence[Candidates]) -> list[int]:
        """How many of each sequence's drafts to verify, the first ones."""
        ...

    def observe(
        self, numbers: DraftNumbers, verified: Sequence[Verification], seconds: float | None
    ) -> None:
        """Learn from a finished step.

        Args:
            numbers: of the drafts that it made.
            verified: its sampled sequences that want drafts.
            seconds: time of the whole step, drafting included; None if another like it would take
                another time.
        """
        ...


class FixedDrafts:
    """Always the same numbers.

    Args:
        made: by the proposer.
        most: of a sequence, whatever their source.
    """

    is_resting = False

    def __init__(self, made: int = 0, most: int = 0) -> None:
        self._all = DraftNumbers(made, max(made, most), max(made, most))
        self._looked_up = msgspec.structs.replace(self._all, made=0)

    def begin(self, num_sequences: int, *, is_steady: bool) -> None:
        """No step rests."""

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        return self._looked_up if num_looked_up == num_sequences else self._all

    def fit(self, numbers: DraftNumbers, made: Sequence[Candidates]) -> list[int]:
        return [each.count for each in made]

    def observe(
        self, numbers: DraftNumbers, verified: Sequence[Verification], seconds: float | None
    ) -> None:
        """Nothing is learnt."""


class _Acceptance:
    """What drafts of one source became, by position: moving means of whether there was a draft,
    where there was one before it, and of whether it was accepted, where that was.
    """

    def __init__(self, most: int) -> None:
        self._made, self._accepted = [1.0] * most, [0.0] * most
        self._num_made, self._num_accepted = [1] * most, [0] * most

    def make(self, count: int, asked: int) -> None:
        """So many drafts were made where so many were asked for."""
        _average(self._made, self._num_made, count, min(asked, len(self._made)))

    def verify(self, num_drafts: int, num_accepted: int) -> None:
        """So many drafts were verified and accepted; grammars make more than `most` of some."""
        most = min(num_drafts, len(self._accepted))
        _average(self._accepted, self._num_accepted, num_accepted, most)

    def expected(self) -> list[tuple[float, float]]:
        """Drafts and accepted ones of a sequence, by the number that is asked for."""
        num_drafts, num_accepted, made, reached, rate = 0.0, 0.0, 1.0, 1.0, _FIRST_ACCEPTED
        totals = [(0.0, 0.0)]
        for own_made, accepted, count in zip(
            self._made, self._accepted, self._num_accepted, strict=True
        ):
            rate = (rate * _PRIOR + accepted * count) / (_PRIOR + count)
            made *= own_made
            reached *= own_made * rate
            num_drafts += made
            num_accepted += reached
            totals.append((num_drafts, num_accepted))
        return totals


def _average(means: list[float], counts: list[int], reached: int, most: int) -> None:
    """Take into means by position that the first `reached` of `most` were as hoped for.

    Positions behind the first that was not say nothing: of 1 of 3, position 0 was as hoped for,
    position 1 was not, and position 2 is unknown.
    """
    for place in range(min(reached + 1, most)):
        counts[place] = min(counts[place] + 1, _WINDOW)
        means[place] += ((place < reached) - means[place]) / counts[place]


class _Plan(msgspec.Struct, frozen=True):
    """What is best, and what else there is.

    Attributes:
        until: the step before which it holds.
        number: the best number of drafts.
        seconds: that a step with it takes.
        least: as in `DraftNumbers`.
        losses: by number, the seconds that a step with it loses.
    """

    until: int
    number: int
    seconds: float
    least: float
    losses: dict[int, float]


class AdaptiveDrafts:
    """The number of drafts with the most expected tokens per second.

    A number's cost is making so many drafts now and verifying them in the next step. A measured
    step makes drafts of its own number and verifies those of the one before; where numbers change,
    the two are told apart. Each other number earns a small credit with every step, and is tried
    once that covers what the step is expected to lose; so times and acceptance stay known, dear
    numbers are rarely tried, and all tries together cost a fixed share of the time.

    Drafts of a lookup, and of some block drafters, come with probabilities. One is verified where
    it is expected to bring more tokens than the time of its row would otherwise; where steps are
    padded its row is there anyway.

    Where no draft pays, steps rest: 1, 3, 7 .. 31 of them before drafts are considered again.

    Args:
        choices: ascending numbers of drafts, starting with 0.
        source, lookup: names of the proposer's drafts and of the lookup's.
        made: most drafts of the proposer.
        padded: ascending numbers of drafts, starting with 0, that steps are padded to, with those
            of the longest sequence; none where a step costs what it verifies in all.
        row_guess: as for `StepTimes`.
        recording: seconds that the first step with a number of sequences and of drafts takes more,
            where steps are recorded; None where they are not. Only recorded steps rest, as others
            would take no less.
    """

    def __init__(
        self,
        choices: Sequence[int],
        source: str,
        lookup: str = "",
        *,
        made: int,
        padded: Sequence[int] = (),
        row_guess: float = ROW_OF_GPU,
        recording: Callable[[], float] | None = None,
    ) -> None:
        if len(choices) < 2 or choices[0] != 0 or list(choices) != sorted(set(choices)):
            raise ValueError(f"expected ascending numbers of drafts from 0, got {choices}")
        if padded and recording is not None:
            raise ValueError("recorded steps have the shapes that they need: nothing pads them")
        self.is_resting = False
        self._choices, self._padded, self._made = tuple(choices), tuple(padded), made
        fractions = [] if padded else [n for n in _FRACTIONS if n < choices[-1]]
        self._levels = sorted({*map(float, padded or choices), *fractions})
        self._source, self._lookup = source, lookup
        self._acceptance = {name: _Acceptance(choices[-1]) for name in (source, lookup)}
        self._times: dict[int, StepTimes] = {}  # by `batch_bucket` of the number of sequences
        self._row_guess, self._recording = row_guess, recording
        # Numbers of sequences and of drafts with which there were steps.
        self._recorded: set[tuple[int, int]] = set()
        # How often steps wanted to verify so many drafts in all, by number of sequences.
        self._wanted: Counter[tuple[int, int]] = Counter()
        self._may_rest = recording is not None and made > 0
        self._credits = dict.fromkeys(choices, 0.0)
        # By sequences in all and those looked up, where that matters.
        self._plans: dict[tuple[int, int], _Plan] = {}
        # The number that was tried last, whether the last step did, and how many will.
        self._tried, self._is_try, self._left_to_try = 0, False, 0
        self._num_steps = self._num_credited = 0
        # Sequences of the last step, steps at rest that are left, and how many there were last.
        self._num_sequences = self._left = self._last = 0
        # Accepted drafts of lookups, and what these expected: sums that fade.
        self._looked_up = [0.0, 0.0]

    def begin(self, num_sequences: int, *, is_steady: bool) -> None:
        self._num_steps += 1
        if num_sequences and num_sequences != self._num_sequences:
            self._num_sequences, self._left, self._last = num_sequences, 0, 0
        if not is_steady:
            self._left = 0
        self.is_resting = num_sequences > 0 and self._left > 0
        self._left -= self.is_resting

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        drafts = num_looked_up < num_sequences and self._made > 0
        times = self._of_batch(num_sequences)
        if self._recording is not None and times.num_steps < _FIRST_STEPS:
            self._recorded.add((num_sequences, 0))
            return DraftNumbers()
        if not times.is_known:
            return self._numbers(self._choices[-1], self._choices[-1], 0.0, drafts=drafts)
        key = num_sequences, num_looked_up if self._padded else 0
        plan = self._plans.get(key)
        if plan is None or self._num_steps >= plan.until:
            plan = self._plans[key] = self._new_plan(times, *key)
        if (drafts or self._padded) and self._is_trying(plan, num_sequences):
            return self._numbers(self._tried, self._tried, 0.0, drafts=drafts)
        most = plan.number if self._padded else self._choices[-1]
        return self._numbers(plan.number, most, plan.least, drafts=drafts)

    def _numbers(self, number: int, most: int, least: float, *, drafts: bool) -> DraftNumbers:
        return DraftNumbers(min(number, self._made) if drafts else 0, number, most, least)

    def _new_plan(self, times: StepTimes, num_sequences: int, num_looked_up: int) -> _Plan:
        own = self._acceptance[self._source].expected()
        found = self._acceptance[self._lookup].expected()
        steps: dict[int, tuple[float, float]] = {}  # tokens, seconds
        for n in self._choices:
            drafts = (num_sequences - num_looked_up) * own[n][0] + num_looked_up * found[n][0]
            accepted = (num_sequences - num_looked_up) * own[n][1] + num_looked_up * found[n][1]
            level = self._level([n]) if self._padded else drafts / num_sequences
            made = min(n, self._made) if num_looked_up < num_sequences else 0
            seconds = times.between(level or 0.0, made)
            if n and num_sequences > 1 and self._recording is not None:
                seconds *= 1 + _NEW_SHAPES
            steps[n] = num_sequences + accepted, seconds
        best = max(steps, key=lambda n: steps[n][0] / steps[n][1])
        tokens, seconds = steps[best]
        losses = {n: s - t * seconds / tokens for n, (t, s) in steps.items() if n != best}
        if self._recording is not None:
            self._recorded.add((num_sequences, best))
            for n in losses:
                if (num_sequences, n) not in self._recorded:
                    losses[n] = 3 * losses[n] + self._recording()
        accepted, expected = self._looked_up
        trust = (accepted + _PRIOR) / (expected + _PRIOR)
        least = 0.0 if self._padded else times.row_seconds * tokens / seconds / trust
        lasting = min(_LASTING, int(self._num_steps * _FIRST_LASTING_SHARE))
        return _Plan(self._num_steps + lasting, best, seconds, least, losses)

    def _is_trying(self, plan: _Plan, num_sequences: int) -> bool:
        """Whether the step tries `_tried`: if that is due, and not twice in a row, but until the
        steps that make and verify so many drafts are recorded and one of them was measured.
        """
        steps, self._num_credited = self._num_steps - self._num_credited, self._num_steps
        if self._left_to_try and num_sequences == self._num_sequences:
            self._left_to_try -= 1
            return True
        earned = steps * plan.seconds * _TRIES / len(plan.losses)
        for n in plan.losses:
            self._credits[n] += earned
        due = max(plan.losses, key=lambda n: self._credits[n] - plan.losses[n])
        if self._is_try or self._credits[due] < plan.losses[due]:
            self._is_try = False
            return False
        shape = num_sequences, due
        is_new = self._recording is not None and shape not in self._recorded
        self._recorded.add(shape)
        self._left_to_try = 2 if is_new else 0
        self._credits[due], self._tried, self._is_try = 0.0, due, True
        return True

    def fit(self, numbers: DraftNumbers, made: Sequence[Candidates]) -> list[int]:
        counts = [each.count for each in made]
        for each in made:
            if each.source == self._source:
                self._acceptance[each.source].make(each.count, numbers.asked)
            else:
                self._acceptance[each.source].make(each.count, numbers.most)
                self._looked_up[1] += each.expected
        total, num_sequences = sum(counts), len(counts)
        more = total % max(num_sequences // 2, 1)
        if more and self._recording is not None:
            self._wanted[num_sequences, total] += 1
            if self._wanted[num_sequences, total] < _RECURRING:
                for _ in range(more):
                    counts[counts.index(max(counts))] -= 1
        if self._may_rest and made and not self._is_try:
            self._left = self._last = 0 if total else min(2 * self._last + 1, _MOST_RESTING)
        return counts

    def observe(
        self, numbers: DraftNumbers, verified: Sequence[Verification], seconds: float | None
    ) -> None:
        for each in verified:
            if each.num_drafts and each.source in self._acceptance:
                self._acceptance[each.source].verify(each.num_drafts, each.num_accepted)
                if each.source == self._lookup:
                    self._looked_up = [s * (1 - 1 / _WINDOW) for s in self._looked_up]
                    self._looked_up[0] += each.num_accepted
        if seconds is None or not verified:
            return
        level = self._level([each.num_drafts for each in verified])
        if level is not None and numbers.made in self._choices:
            self._of_batch(len(verified)).observe(level, numbers.made, seconds)

    def _level(self, counts: Sequence[int]) -> float | None:
        """Drafts per sequence, as `StepTimes` tell steps apart; None if it is none of them."""
        if self._padded:
            return next((level for level in self._levels if level >= max(counts)), None)
        total, count = sum(counts), len(counts)
        nearest = min(self._levels, key=lambda level: abs(level * count - total))
        return nearest if abs(nearest * count - total) <= 0.5 else None

    def _of_batch(self, num_sequences: int) -> StepTimes:
        bucket = batch_bucket(num_sequences)
        if bucket not in self._times:
            near = min(self._times, key=lambda other: abs(other - bucket), default=bucket)
            self._times[bucket] = StepTimes(
                self._levels,
                [n for n in self._choices if n <= self._made],
                num_sequences,
                self._times.get(near),
                row_guess=self._row_guess,
                skips_first=self._recording is None,
            )
        return self._times[bucket]
