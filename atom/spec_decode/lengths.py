"""How many drafts to make in each step, and which of them to verify, chosen from measurements.

Drafts cost time to make and, in the next step, to verify; how many are accepted depends on the
text. `AdaptiveLength` measures all three and maximises the expected tokens per second. It also
tries other numbers now and then, for a bounded share of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from atom.spec_decode.calibration import Calibration
from atom.spec_decode.cuts import CutByTotal, CutRule
from atom.spec_decode.step_times import ROW_OF_GPU, StepTimes, batch_bucket

# Share of the time that may be lost to tries.
_PROBE_SHARE = 0.01
# Steps after which expectations are computed anew, and how many of them are kept.
_LASTING, _MOST_KEPT = 4, 64


@dataclass(frozen=True)
class Candidates:
    """Drafts that were made for a sequence.

    Attributes:
        source: of the drafts, also when it made none.
        confidences: how sure it is of each, as a probability if those before are right.
    """

    source: str
    confidences: Sequence[float]


@dataclass(frozen=True)
class Verification:
    """The result of verifying one sequence's drafts.

    Attributes:
        source: source of the drafts, also when it made none; None after a step that proposed none.
        confidences: of each verified draft.
        num_accepted: of them.
    """

    source: str | None
    confidences: Sequence[float]
    num_accepted: int


class DraftLength(Protocol):
    """Chooses how many drafts are made for all sequences of a step, and which are verified.

    Each step that samples calls `choose`, `cut`, then `observe`: when it chooses, the acceptance of
    the drafts that it verifies is not known yet.
    """

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        """The number of drafts to make in this step for each sampled sequence.

        Args:
            sources: of each sequence's drafts; at least one.
            drafts: whether the draft model makes drafts, rather than only writing its KV.
        """
        ...

    def cut(self, made: Sequence[Candidates]) -> list[int]:
        """How many of each sequence's drafts to verify, the first ones."""
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


@dataclass(frozen=True)
class _Step:
    """What a step is expected to bring and to take."""

    tokens: float
    seconds: float


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
        first_run: what a step of a new shape takes more than others like it, as a share of a step.
            Such steps are run when they pay for that in as many steps as the engine has had with as
            many sequences. Their first run is not measured then.
        row_guess: as for `StepTimes`.
    """

    def __init__(
        self,
        choices: Sequence[int],
        rule: CutRule | None = None,
        *,
        first_run: float = 0.0,
        row_guess: float = ROW_OF_GPU,
    ) -> None:
        if len(choices) < 2 or choices[0] != 0 or list(choices) != sorted(set(choices)):
            raise ValueError(f"expected ascending numbers of drafts from 0, got {choices}")
        self._choices = tuple(choices)
        self._rule = rule or CutByTotal(choices)
        self._calibrations: dict[str, Calibration] = {}
        self._times: dict[int, StepTimes] = {}  # by `batch_bucket` of the number of sequences
        self._credits = dict.fromkeys(choices, 0.0)
        self._first_run, self._row_guess = first_run, row_guess
        # Steps that were run: sequences, drafts verified in all, and drafts made of each sequence;
        # and how many, by sequences.
        self._shapes: set[tuple[int, int, int]] = set()
        self._num_run: Counter[int] = Counter()
        # Drafts that the step verifies, in all.
        self._num_verified = 0
        # Of the current step: drafts requested, and those of them that the draft model makes.
        self._asked = self._made = 0
        # Expected tokens per second of what is best; None before times are known.
        self._rate: float | None = None
        self._is_try = False
        # Expectations by numbers of sequences of each source, and the step they were computed in.
        self._kept: dict[Hashable, tuple[int, Mapping[int, Mapping[float, float]]]] = {}
        self._num_steps = 0

    def choose(self, sources: Sequence[str], *, drafts: bool) -> int:
        self._asked = self._choose(sources, drafts)
        self._made = self._asked if drafts else 0
        return self._asked

    def cut(self, made: Sequence[Candidates]) -> list[int]:
        kept = self._cut(made) if self._asked else [0] * len(made)
        self._num_verified = sum(kept)
        return kept

    def _cut(self, made: Sequence[Candidates]) -> list[int]:
        survivals = [self._of(own.source).see(own.confidences, self._asked) for own in made]
        cuts = self._rule.cuts(survivals)
        if self._is_try or self._rate is None:
            return cuts[max(cuts)]
        rate, times = self._rate, self._of_batch(len(made))
        sums = [[0.0, *accumulate(own)] for own in survivals]

        def worth(level: float) -> float:
            gain = sum(own[n] for own, n in zip(sums, cuts[level], strict=True))
            new = self._is_new(len(made), sum(cuts[level]), self._made)
            return gain - rate * times.at(level, self._made) * (1 + new)

        return cuts[max(cuts, key=worth)]

    def follow(self, num_drafts: int) -> None:
        self._asked = self._made = num_drafts

    def observe(self, verifications: Sequence[Verification], seconds: float | None) -> None:
        for v in verifications:
            if v.source is not None:
                self._of(v.source).observe(v.confidences, v.num_accepted)
        if not verifications:
            return
        nums = [len(v.confidences) for v in verifications]
        self._shapes.add((len(nums), sum(nums), self._made))
        self._num_run[len(nums)] += 1
        level = self._rule.level_of(nums)
        if seconds is not None and level is not None:
            self._of_batch(len(nums)).observe(level, self._made, seconds)

    def _is_new(self, num_sequences: int, num_verified: int, made: int) -> float:
        """What a step takes more if it is the first of its kind, as a share, over such steps."""
        if not self._first_run or (num_sequences, num_verified, made) in self._shapes:
            return 0.0
        return self._first_run / (1 + self._num_run[num_sequences])

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
                skips_first=not self._first_run,
            )
        return self._times[bucket]

    def _choose(self, sources: Sequence[str], drafts: bool) -> int:
        times = self._of_batch(len(sources))
        if not times.is_known:
            self._rate = None
            # The smallest steps where each shape costs.
            return 0 if self._first_run else self._choices[-1]
        expected = self._expected(sources)
        # For each choice, the step that verifies the best of its drafts, and that of all of them.
        best_of: dict[int, _Step] = {}
        all_of: dict[int, _Step] = {}
        for n in self._choices:
            made = n if drafts else 0
            steps = {
                level: _Step(len(sources) + gain, times.at(level, made))
                for level, gain in expected[n].items()
            }
            best_of[n] = max(steps.values(), key=lambda step: step.tokens / step.seconds)
            all_of[n] = steps[max(steps)]
        new = {
            n: self._is_new(len(sources), self._num_verified, n if drafts else 0)
            for n in self._choices
        }
        best = max(
            self._choices,
            key=lambda n: best_of[n].tokens / (best_of[n].seconds * (1 + new[n])),
        )
        self._rate = best_of[best].tokens / best_of[best].seconds
        count = 1 + self._num_run[len(sources)]
        for n, step in all_of.items():
            all_of[n] = replace(step, seconds=step.seconds * (1 + new[n] * count))
        return self._or_try(best, best_of[best], all_of)

    def _expected(self, sources: Sequence[str]) -> Mapping[int, Mapping[float, float]]:
        """The drafts that are expected to be accepted, by choice and level."""
        self._num_steps += 1
        key = frozenset(Counter(sources).items())
        known = self._kept.get(key)
        if known is not None and self._num_steps < known[0] + _LASTING:
            return known[1]
        most = self._choices[-1]
        groups = [(count, self._of(source).recent(most)) for source, count in key]
        expected = {
            n: self._rule.expected([(count, own[:, :n]) for count, own in groups])
            for n in self._choices
        }
        if len(self._kept) == _MOST_KEPT:
            self._kept.clear()
        self._kept[key] = self._num_steps, expected
        return expected

    def _or_try(self, best: int, step: _Step, steps: Mapping[int, _Step]) -> int:
        """The best choice, or one that is due to be tried.

        Args:
            step: with the best choice.
            steps: that verify all drafts of each choice.
        """
        due: dict[int, float] = {}
        for n, other in steps.items():
            if n == best and other == step:
                self._credits[n] = 0.0
                continue
            self._credits[n] += _PROBE_SHARE / (len(self._choices) - 1) * step.seconds
            due[n] = self._credits[n] - (other.seconds - other.tokens * step.seconds / step.tokens)
        chosen = max(due, key=lambda n: due[n])
        if due[chosen] < 0 or self._is_try:
            self._is_try = False
            return best
        self._credits[chosen] = 0.0
        self._is_try = True
        return chosen

    def _of(self, source: str) -> Calibration:
        if source not in self._calibrations:
            self._calibrations[source] = Calibration(self._choices[-1])
        return self._calibrations[source]
