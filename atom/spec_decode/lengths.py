"""How many drafts to make in each step, and which of them to verify, chosen from measurements.

Drafts cost time to make and, in the next step, to verify; how many are accepted depends on the
text. `AdaptiveLength` measures all three and maximises the expected tokens per second. It also
tries other numbers now and then, for a bounded share of the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from atom.spec_decode.calibration import Calibration
from atom.spec_decode.cuts import CutByTotal, CutRule
from atom.spec_decode.first_runs import FirstRuns, StepShape
from atom.spec_decode.step_times import ROW_OF_GPU, StepTimes, batch_bucket

# Share of the time that may be lost to tries.
_PROBE_SHARE = 0.01
# Steps after which plans are made anew, and how many of them are kept. The first ones, which know
# little, last for a share of the steps before them.
_LASTING, _MOST_KEPT = 16, 64
_FIRST_LASTING_SHARE = 1 / 16


class Candidates(msgspec.Struct, frozen=True):
    """Drafts that were made for a sequence.

    Attributes:
        source: of the drafts, also when it made none.
        confidences: how sure it is of each, as a probability if those before are right.
    """

    source: str
    confidences: Sequence[float]


class Verification(msgspec.Struct, frozen=True):
    """The result of verifying one sequence's drafts.

    Attributes:
        source: source of the drafts, also when it made none; None after a step that proposed none.
        confidences: of each verified draft.
        num_accepted: of them.
    """

    source: str | None
    confidences: Sequence[float]
    num_accepted: int


class Choice(msgspec.Struct, frozen=True):
    """What was chosen for a step, from which its other calls go on.

    Attributes:
        asked: drafts to make for each sampled sequence.
        made: those of them that the draft model makes.
        verified: how many of them the next step verifies of each sequence, if that is chosen
            already; None if `cut` chooses.
        is_try: all drafts are verified.
        rate: expected tokens per second of what is best; None before times are known.
    """

    asked: int
    made: int
    verified: int | None = None
    is_try: bool = False
    rate: float | None = None


class DraftLength(Protocol):
    """Chooses how many drafts are made for all sequences of a step, and which are verified.

    Each step that samples calls `choose`, `cut`, then `observe`: when it chooses, the acceptance of
    the drafts that it verifies is not known yet. Where steps overlap, the next one chooses before
    this one cuts.
    """

    def choose(self, sources: Sequence[str], *, drafts: bool) -> Choice:
        """The number of drafts to make in this step for each sampled sequence.

        Args:
            sources: of each sequence's drafts; at least one.
            drafts: whether the draft model makes drafts, rather than only writing its KV.
        """
        ...

    def cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        """How many of each sequence's drafts to verify, the first ones.

        Args:
            choice: of the step that made them.
        """
        ...

    def observe(
        self, choice: Choice, verifications: Sequence[Verification], seconds: float | None
    ) -> None:
        """Learn from a finished step.

        Args:
            choice: the step's own.
            verifications: of its sampled sequences, for the drafts made in the step before.
            seconds: time of the whole step, drafting included; None when it also computed prompts.
        """
        ...


def spread_lengths(most: int) -> tuple[int, ...]:
    """Numbers of drafts to choose from: the small ones, some larger ones, and `most`."""
    return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6, 8, 12) if n < most} | {most}))


class _Step(NamedTuple):
    """What a step is expected to bring and to take."""

    tokens: float
    seconds: float


class _Plan(NamedTuple):
    """What is best, and what else there is.

    Attributes:
        made_in: the step that made the plan.
        best: number of drafts to make.
        level: drafts of each sequence that the next step verifies then.
        step: that step.
        losses: by choice, the seconds that trying it is expected to lose, all its drafts verified;
            without the best one where that is the same step.
    """

    made_in: int
    best: int
    level: float
    step: _Step
    losses: Mapping[int, float]


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

    Args:
        choices: ascending numbers of drafts, starting with 0.
        rule: `CutByTotal` of these when left out.
        first_runs: what steps of new shapes take more; they are run when they pay for that in as
            many steps as the engine has had with as many sequences. Their first run is not measured
            then. None where they take no more.
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
        # Drafts that the next step verifies, in all.
        self._num_verified = 0
        # Whether the last choice was one.
        self._is_try = False
        # By numbers of sequences of each source, and what else a plan depends on.
        self._plans: dict[Hashable, _Plan] = {}
        self._num_steps = 0

    def choose(self, sources: Sequence[str], *, drafts: bool) -> Choice:
        times = self._of_batch(len(sources))
        if not times.is_known:
            # The smallest steps where each shape costs.
            asked = 0 if self._first_runs.cost else self._choices[-1]
            return Choice(asked, asked if drafts else 0, asked if self._is_ahead else None)
        plan = self._plan(sources, drafts=drafts)
        asked = self._or_try(plan)
        verified = None
        if self._is_ahead:
            verified = asked if self._is_try else int(plan.level)
        rate = plan.step.tokens / plan.step.seconds
        return Choice(asked, asked if drafts else 0, verified, self._is_try, rate)

    def cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        kept = self._cut(choice, made) if choice.asked else [0] * len(made)
        self._num_verified = sum(kept)
        return kept

    def _cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        survivals = [self._of(own.source).see(own.confidences, choice.asked) for own in made]
        if choice.verified is not None:
            return [min(len(own), choice.verified) for own in survivals]
        gains = self._rule.gains(survivals)
        if choice.is_try or choice.rate is None:
            return self._rule.cut(survivals, max(gains))
        rate, times, runs = choice.rate, self._of_batch(len(made)), self._first_runs

        def worth(level: float) -> float:
            total, gain = gains[level]
            new = StepShape(len(made), total, choice.made)
            return gain - rate * times.at(level, choice.made) * (1 + runs.share_of(new))

        return self._rule.cut(survivals, max(gains, key=worth))

    def observe(
        self, choice: Choice, verifications: Sequence[Verification], seconds: float | None
    ) -> None:
        for v in verifications:
            if v.source is not None:
                self._of(v.source).observe(v.confidences, v.num_accepted)
        if not verifications:
            return
        nums = [len(v.confidences) for v in verifications]
        self._first_runs.ran(StepShape(len(nums), sum(nums), choice.made))
        level = self._rule.level_of(nums)
        if seconds is not None and level is not None:
            self._of_batch(len(nums)).observe(level, choice.made, seconds)

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
                skips_first=not self._first_runs.cost,
            )
        return self._times[bucket]

    def _plan(self, sources: Sequence[str], *, drafts: bool) -> _Plan:
        self._num_steps += 1
        groups = frozenset([(source, sources.count(source)) for source in set(sources)])
        key = groups, drafts, self._new_choices(len(sources), drafts)
        known = self._plans.get(key)
        lasting = min(_LASTING, self._num_steps * _FIRST_LASTING_SHARE)
        if known is not None and self._num_steps < known.made_in + lasting:
            return known
        if len(self._plans) == _MOST_KEPT:
            self._plans.clear()
        plan = self._plans[key] = self._new_plan(len(sources), groups, drafts)
        return plan

    def _new_choices(self, num_sequences: int, drafts: bool) -> tuple[int, ...]:
        """Those with which the step would be of a shape that was not run."""
        if not self._first_runs.cost:
            return ()
        num_verified, cost_of = self._num_verified, self._first_runs.cost_of
        shapes = [(n, StepShape(num_sequences, num_verified, n * drafts)) for n in self._choices]
        return tuple([n for n, shape in shapes if cost_of(shape)])

    def _new_plan(
        self, num_sequences: int, groups: Iterable[tuple[str, int]], drafts: bool
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
        for n in self._choices:
            made = n if drafts else 0
            expected = self._rule.expected([(count, own[:, :n]) for count, own in recent])
            steps = {
                level: _Step(num_sequences + gain, times.at(level, made))
                for level, gain in expected.items()
            }
            best_of[n] = max(steps.items(), key=lambda own: own[1].tokens / own[1].seconds)
            shape = StepShape(num_sequences, self._num_verified, made)
            tokens, seconds = best_of[n][1]
            rates[n] = tokens / (seconds * (1 + runs.share_of(shape)))
            tokens, seconds = steps[max(steps)]
            all_of[n] = _Step(tokens, seconds * (1 + runs.cost_of(shape)))
        best = max(rates, key=lambda n: rates[n])
        level, step = best_of[best]
        losses = {
            n: other.seconds - other.tokens * step.seconds / step.tokens
            for n, other in all_of.items()
            if n != best or other != step
        }
        return _Plan(self._num_steps, best, level, step, losses)

    def _or_try(self, plan: _Plan) -> int:
        """The best choice, or one that is due to be tried."""
        credits, share = self._credits, _PROBE_SHARE / (len(self._choices) - 1)
        for n in self._choices:
            credits[n] = credits[n] + share * plan.step.seconds if n in plan.losses else 0.0
        chosen = max(plan.losses, key=lambda n: credits[n] - plan.losses[n])
        if credits[chosen] < plan.losses[chosen] or self._is_try:
            self._is_try = False
            return plan.best
        self._credits[chosen] = 0.0
        self._is_try = True
        return chosen

    def _of(self, source: str) -> Calibration:
        if source not in self._calibrations:
            self._calibrations[source] = Calibration(self._choices[-1])
        return self._calibrations[source]
