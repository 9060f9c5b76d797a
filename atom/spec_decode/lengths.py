"""How many drafts to make in each step, and which of them to verify, chosen from measurements.

Drafts cost time to make and, in the next step, to verify; how many are accepted depends on the
text. `AdaptiveLength` measures all three and maximises the expected tokens per second. It also
tries other numbers now and then, for a bounded share of the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from atom.spec_decode.calibration import Calibration
from atom.spec_decode.cuts import CutByTotal, CutRule
from atom.spec_decode.draft_length import Candidates, Choice, Verification
from atom.spec_decode.first_runs import FirstRuns, StepShape
from atom.spec_decode.step_times import ROW_OF_GPU, StepTimes, batch_bucket

# Share of the time that may be lost to tries.
_PROBE_SHARE = 0.01
# Steps after which plans are made anew, the first of them that are learnt from, and how many plans
# are kept. The first plans, which know little, last for a share of the steps before them.
_LASTING, _WATCHED, _MOST_KEPT = 32, 8, 64
_FIRST_LASTING_SHARE = 1 / 16
# What drafts for several sequences have to bring more than none where steps of new shapes take
# more: as sequences come and go, there are numbers of drafts that no step had.
_LEAST_GAIN = 0.12
# Steps at rest count as so many at most.
_MOST_RESTING = 4
# All drafts are verified where choosing among them promises no more than this.
_NEGLIGIBLE = 0.01


def spread_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts to choose from: the small ones, some larger ones, and `most`."""
    return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12) if n < most} | {most}))


class _Step(NamedTuple):
    """What a step is expected to bring and to take."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class _Plan(NamedTuple):
    """What is best, and what else there is.

    Attributes:
        watched, lasts: until these steps it is learnt from, and it holds.
        choice: the best.
        step: that verifies its drafts.
        losses: by choice, the seconds that trying it is expected to lose, all its drafts verified;
            without the best one where that is the same step.
        is_first: the step that made the plan would have been the first of its shape.
    """

    watched: float
    lasts: float
    choice: Choice
    step: _Step
    losses: Mapping[int, float]
    is_first: bool


class AdaptiveLength:
    """Makes and verifies the numbers of drafts with the most expected tokens per second.

    The cost of a choice is making drafts now and verifying the best of them in the next step. A
    measured step contains the making of its own choice and the verifying of the one before; where
    choices change, the two are told apart. A draft is verified when it is expected to bring more
    tokens than the time that it takes would bring otherwise.

    Each number that is not chosen earns a small credit per step and is tried once the credit covers
    the expected loss; all drafts of a try are verified. So estimates stay fresh, expensive tries
    are rare, and all tries together cost a fixed share of the time. Two tries never follow each
    other.

    A plan holds for some steps, and only the first of these are learnt from: all this takes time
    as well.

    Args:
        choices: ascending numbers of drafts, starting with 0.
        rule: `CutByTotal` of these when left out.
        first_runs: what steps of new shapes take more; they are run when they are expected to pay
            for that. Their first run is not measured then. None where they take no more.
        row_guess: as for `StepTimes`.
        is_ahead: the next step is launched before it is known what this one drafts, and verifies as
            many drafts of each sequence as `choose` expects to be best; `rule` is `CutToLongest`.
    """

    def __init__(
        self,
        choices: Sequence[int],
        rule: CutRule | None = None,
        *,
        first_runs: FirstRuns | None = None,
        row_guess: float = ROW_OF_GPU,
        is_ahead: bool = False,
    ) -> None:
        if len(choices) < 2 or choices[0] != 0 or list(choices) != sorted(set(choices)):
            raise ValueError(f"expected ascending numbers of drafts from 0, got {choices}")
        self._choices = tuple(choices)
        self._rule = rule or CutByTotal(choices)
        self._calibrations: dict[str, Calibration] = {}
        self._times: dict[int, StepTimes] = {}  # by `batch_bucket` of the number of sequences
        self._credits = dict.fromkeys(choices, 0.0)
        self._first_runs, self._row_guess = first_runs or FirstRuns(), row_guess
        self._is_ahead = is_ahead
        # Sequences that were cut last, and their drafts that the next step verifies, in all, if it
        # has the same ones.
        self._num_sequences = self._num_verified = 0
        # Whether the last choice was a try.
        self._is_try = False
        # By numbers of sequences of each source, and whether the draft model makes drafts.
        self._plans: dict[Hashable, _Plan] = {}
        # Numbers of sequences with which steps were at rest.
        self._at_rest: set[int] = set()
        # Steps so far, and those when credits were earned last.
        self._num_steps = self._num_credited = 0

    def choose(self, sources: Sequence[str], *, drafts: bool) -> Choice:
        self._num_steps += 1
        groups = frozenset([(source, sources.count(source)) for source in set(sources)])
        plan = self._plans.get((groups, drafts))
        if plan is not None and self._goes_on(plan, len(sources)):
            return plan.choice
        times = self._of_batch(len(sources))
        if not times.is_known:
            # The smallest steps where each shape costs.
            asked = 0 if self._first_runs.is_costly else self._choices[-1]
            return Choice(asked, asked if drafts else 0, asked if self._is_ahead else None)
        if plan is None or self._is_due(plan, len(sources)):
            if len(self._plans) == _MOST_KEPT:
                self._plans.clear()
            plan = self._new_plan(len(sources), groups, drafts=drafts)
            self._plans[groups, drafts] = plan
        tried = self._try(plan)
        if tried is None:
            return msgspec.structs.replace(plan.choice, is_watched=True)
        verified = tried if self._is_ahead else None
        return Choice(tried, tried if drafts else 0, verified, True, plan.choice.rate)

    def _goes_on(self, plan: _Plan, num_sequences: int) -> bool:
        """Whether the step is one of a plan's that are not learnt from."""
        is_later = plan.watched <= self._num_steps < plan.lasts
        return is_later and not self._is_try and not self._is_first(plan, num_sequences)

    def _is_due(self, plan: _Plan, num_sequences: int) -> bool:
        """Whether a plan is to be made anew."""
        is_over = self._num_steps >= plan.lasts
        return is_over or (self._is_first(plan, num_sequences) and not plan.is_first)

    def _is_first(self, plan: _Plan, num_sequences: int) -> bool:
        """Whether no step was of the shape that this one has with the best choice."""
        return self._first_runs.is_new(self._shape(num_sequences, plan.choice.made))

    def _shape(self, num_sequences: int, made: int) -> StepShape:
        return StepShape(num_sequences, self._num_verified, made)

    def cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        if not made:
            return []
        if len(made) == self._num_sequences:
            self._first_runs.ran(self._shape(len(made), choice.made))
        kept = self._cut(choice, made) if choice.asked else [0] * len(made)
        self._num_sequences, self._num_verified = len(made), sum(kept)
        return kept

    def _cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        if choice.verified is not None:
            kept = self._all_of(choice.verified, made)
            if kept is not None:
                if choice.is_watched:
                    self._see(choice, made)
                return kept
        survivals = self._see(choice, made)
        gains = self._rule.gains(survivals)
        if choice.is_try or choice.rate is None:
            return self._rule.cut(survivals, max(gains))
        rate, times, runs = choice.rate, self._of_batch(len(made)), self._first_runs

        def worth(level: float) -> float:
            total, gain = gains[level]
            new = StepShape(len(made), total, choice.made)
            first = runs.share(new) if total else 0.0
            return gain - rate * (times.at(level, choice.made) + first)

        return self._rule.cut(survivals, max(gains, key=worth))

    def _see(self, choice: Choice, made: Sequence[Candidates]) -> list[list[float]]:
        return [self._of(own.source).see(own.confidences, choice.asked) for own in made]

    def _all_of(self, count: int, made: Sequence[Candidates]) -> list[int] | None:
        """The first `count` drafts of each sequence; None if no step verifies just these."""
        kept = [min(len(own.confidences), count) for own in made]
        return kept if self._is_ahead or self._rule.level_of(kept) is not None else None

    def observe(
        self, choice: Choice, verifications: Sequence[Verification], seconds: float | None
    ) -> None:
        if not choice.is_watched:
            return
        for v in verifications:
            if v.source is not None:
                self._of(v.source).observe(v.confidences, v.num_accepted)
        if not verifications:
            return
        nums = [len(v.confidences) for v in verifications]
        shape = StepShape(len(nums), sum(nums), choice.made)
        if self._first_runs.is_new(shape):
            self._first_runs.ran(shape)
        level = self._rule.level_of(nums)
        times = self._of_batch(len(nums))
        # What such a step takes is known from those at rest, which take the host less.
        is_rest = not choice.asked and not level and len(nums) in self._at_rest
        if seconds is not None and level is not None and not is_rest:
            times.observe(level, choice.made, seconds)

    def rest(self, num_sequences: int, seconds: Sequence[float | None]) -> None:
        self._num_steps += len(seconds)
        self._first_runs.ran(StepShape(num_sequences, 0, 0), len(seconds))
        known = [each for each in seconds if each is not None]
        if known:
            times, usual = self._of_batch(num_sequences), median(known)
            for _ in known[:_MOST_RESTING]:
                times.observe(0.0, 0, usual)
            self._at_rest.add(num_sequences)

    def _of_batch(self, num_sequences: int) -> StepTimes:
        bucket = batch_bucket(num_sequences)
        if bucket not in self._times:
            near = min(self._times, key=lambda other: abs(other - bucket), default=bucket)
            like = self._times.get(near)
            self._times[bucket] = StepTimes(
                self._rule.levels,
                self._choices,
                num_sequences,
                like,
                row_guess=self._row_guess,
                skips_first=not self._first_runs.is_costly,
            )
        return self._times[bucket]

    def _new_plan(
        self, num_sequences: int, groups: Iterable[tuple[str, int]], *, drafts: bool
    ) -> _Plan:
        """Args:
        groups: sources, with their numbers of sequences.
        """
        times, runs, most = self._of_batch(num_sequences), self._first_runs, self._choices[-1]
        recent = [(count, self._of(source).recent(most)) for source, count in groups]
        # For each choice, the step that verifies the best of its drafts, with how many they are of
        # each sequence, and the step that verifies all of them.
        best_of: dict[int, tuple[float, _Step]] = {}
        all_of: dict[int, _Step] = {}
        rates: dict[int, float] = {}
        worth = 1 - _LEAST_GAIN if runs.is_costly and num_sequences > 1 else 1.0
        for n in self._choices:
            made = n if drafts else 0
            expected = self._rule.expected([(count, own[:, :n]) for count, own in recent])
            steps = {
                level: _Step(num_sequences + gain, times.at(level, made))
                for level, gain in expected.items()
            }
            best_of[n] = max(steps.items(), key=lambda own: own[1].rate)
            shape = self._shape(num_sequences, made)
            tokens, seconds = best_of[n][1]
            # Steps without drafts are needed sooner or later.
            rates[n] = tokens / seconds
            if n:
                rates[n] = worth * tokens / (seconds + runs.share(shape))
            tokens, seconds = steps[max(steps)]
            all_of[n] = _Step(tokens, seconds + runs.seconds(shape))
        best = max(rates, key=lambda n: rates[n])
        level, step = best_of[best]
        verified = int(level) if self._is_ahead else None
        if all_of[best].rate >= (1 - _NEGLIGIBLE) * step.rate:
            verified, step = best, all_of[best]
        pace = (1.0 if best else worth) / best_of[best][1].rate
        losses = {
            n: other.seconds - other.tokens * pace
            for n, other in all_of.items()
            if n != best or other != step
        }
        steps_so_far = self._num_steps
        lasting = min(_LASTING, steps_so_far * _FIRST_LASTING_SHARE)
        choice = Choice(best, best if drafts else 0, verified, rate=step.rate, is_watched=False)
        watched, lasts = steps_so_far + min(_WATCHED, lasting), steps_so_far + lasting
        is_first = runs.is_new(self._shape(num_sequences, choice.made))
        return _Plan(watched, lasts, choice, step, losses, is_first)

    def _try(self, plan: _Plan) -> int | None:
        """The choice that is due to be tried, if one is."""
        credits, share = self._credits, _PROBE_SHARE / (len(self._choices) - 1)
        share *= self._num_steps - self._num_credited
        self._num_credited = self._num_steps
        for n in self._choices:
            credits[n] = credits[n] + share * plan.step.seconds if n in plan.losses else 0.0
        chosen = max(plan.losses, key=lambda n: credits[n] - plan.losses[n])
        if credits[chosen] < plan.losses[chosen] or self._is_try:
            self._is_try = False
            return None
        self._credits[chosen] = 0.0
        self._is_try = True
        return chosen

    def _of(self, source: str) -> Calibration:
        if source not in self._calibrations:
            self._calibrations[source] = Calibration(self._choices[-1])
        return self._calibrations[source]
