"""The adaptive number of drafts against a simulated machine: what it chooses, what trying costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from atom.spec_decode.draft_policy import (
    AdaptiveDrafts,
    Candidates,
    DraftNumbers,
    DraftPolicy,
    FixedDrafts,
    Verification,
    spread_numbers,
)
from atom.spec_decode.step_times import StepTimes
from atom.spec_decode.suffix_index import Continuation


@dataclass
class Machine:
    """Costs in seconds, and sequences whose drafts are accepted at random.

    Attributes:
        step: of a target step, and of each of its rows.
        draft: of a draft step, and of completing the draft's KV alone.
        acceptance: by source, of a draft whose predecessors were accepted.
        lies: a lookup is sure of its drafts whatever they are.
        mix: the share of steps that a sequence spends on each source.
        noise: relative deviation of every time.
        slowness: factor of every time, by step.
        first_run: seconds that a number of rows, or of drafts, takes more the first time.
    """

    step: tuple[float, float] = (0.0100, 0.0004)
    draft: tuple[float, float] = (0.0008, 0.0001)
    acceptance: dict[str, float] = field(default_factory=lambda: {"eagle3": 0.65})
    lies: bool = False
    mix: dict[str, float] = field(default_factory=lambda: {"eagle3": 1.0})
    noise: float = 0.1
    slowness: Callable[[int], float] = lambda step: 1.0
    first_run: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self, num_sequences: int, verified: int, made: int) -> float:
        """Of a step that verifies so many drafts in all and makes so many of each sequence."""
        base, per_row = self.step
        verifying = base + per_row * (num_sequences + verified)
        drafting = self.draft[0] * made if made else self.draft[1]
        return self.jitter(verifying) + self.jitter(drafting)

    def num_right(self, source: str) -> int:
        """How many drafts the target would sample, if there were enough."""
        right = 0
        while self.rng.random() < self.acceptance[source] and right < 20:
            right += 1
        return right

    def jitter(self, seconds: float) -> float:
        return seconds * (1 + self.noise * abs(self.rng.gauss(0, 1)))


@dataclass
class Run:
    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0
    chosen: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(
    policy: DraftPolicy,
    machine: Machine,
    batch: int,
    steps: int,
    *,
    is_ahead: bool = False,
    padded: Sequence[int] = (),
) -> Run:
    """Args:
    is_ahead: the next step chooses before this one fits and is observed.
    padded: as for `AdaptiveDrafts`.
    """
    result = Run()
    names, shares = list(machine.mix), list(machine.mix.values())
    # Source, number of drafts to verify, and how many of them are right.
    pending: list[tuple[str, int, int]] = []
    seen: set[tuple[str, int]] = set()
    unread: list[Callable[[], list[int]]] = []
    for step in range(steps):
        sources = machine.rng.choices(names, shares, k=batch)
        policy.begin(batch, is_steady=True)
        is_resting, numbers = policy.is_resting, DraftNumbers()
        if not is_resting:
            numbers = policy.choose(sources.count("lookup"), batch)
        for read in unread:
            read()
        verified = sum(count for _, count, _ in pending)
        if padded:
            most = max((count for _, count, _ in pending), default=0)
            verified = batch * next(n for n in padded if n >= most)
        kinds = {("verified", verified), ("made", numbers.made)}
        seconds = machine.seconds(batch, verified, numbers.made)
        seconds += machine.first_run * len(kinds - seen)
        seconds *= machine.slowness(step)
        seen |= kinds
        verifications = [Verification(None, 0, 0)] * (batch - len(pending))
        verifications += [Verification(*own) for own in pending]
        rights = [machine.num_right(source) for source in sources]
        candidates = []
        for source in sources:
            count, expected = numbers.made, 0.0
            if source == "lookup":
                sure = 0.97 if machine.lies else machine.acceptance[source]
                drafts = Continuation([0] * numbers.most, [sure] * numbers.most)
                drafts = drafts.likely(numbers.least)
                count, expected = len(drafts.token_ids), drafts.score
            candidates.append(Candidates(source, count, expected))

        def finish(
            is_resting: bool = is_resting,
            numbers: DraftNumbers = numbers,
            candidates: list[Candidates] = candidates,
            verifications: list[Verification] = verifications,
            seconds: float = seconds,
        ) -> list[int]:
            kept = [0] * len(candidates) if is_resting else policy.fit(numbers, candidates)
            policy.observe(numbers, verifications, seconds)
            return kept

        if is_ahead:
            unread, kept = [finish], [numbers.made] * batch
        else:
            kept = finish()
        result.tokens += batch + sum(v.num_accepted for v in verifications)
        result.seconds += seconds
        result.chosen[numbers.asked] += 1
        result.rows += sum(kept)
        pending = [
            (source, count, min(right, count))
            for source, right, count in zip(sources, rights, kept, strict=True)
        ]
    return result


def fresh(machine: Machine) -> Machine:
    """Whose accidents do not depend on what ran before."""
    return replace(machine, rng=random.Random(0))


def num_steps(batch: int) -> int:
    return 2000 if batch < 8 else 400


def rate_of(num_drafts: int, machine: Machine, batch: int, padded: Sequence[int] = ()) -> float:
    policy = FixedDrafts(num_drafts, num_drafts)
    return run(policy, fresh(machine), batch, num_steps(batch), padded=padded).rate


def adaptive(choices: Sequence[int], **options: Any) -> AdaptiveDrafts:
    return AdaptiveDrafts(choices, "eagle3", "lookup", **{"made": choices[-1], **options})


SITUATIONS = {
    "good draft": (Machine(acceptance={"eagle3": 0.8}), 1),
    "fair draft": (Machine(acceptance={"eagle3": 0.4}), 1),
    "useless draft": (Machine(acceptance={"eagle3": 0.02}), 1),
    "small batch": (Machine(acceptance={"eagle3": 0.6}), 4),
    "large batch": (Machine(step=(0.01, 0.002), acceptance={"eagle3": 0.5}), 32),
    "large batch, good draft": (Machine(step=(0.01, 0.001), acceptance={"eagle3": 0.9}), 32),
    "dear draft": (Machine(draft=(0.004, 0.0001), acceptance={"eagle3": 0.5}), 1),
    "hybrid": (
        Machine(
            acceptance={"eagle3": 0.3, "lookup": 0.8},
            mix={"eagle3": 0.7, "lookup": 0.3},
        ),
        1,
    ),
}


@pytest.mark.parametrize("choices", [(0, 1, 2, 3), (0, 3), spread_numbers(7)], ids=str)
@pytest.mark.parametrize("name", SITUATIONS)
def test_no_fixed_number_is_five_percent_faster(name: str, choices: tuple[int, ...]) -> None:
    """Its own beginning included."""
    machine, batch = SITUATIONS[name]
    best = max(rate_of(n, machine, batch) for n in choices)
    found = run(adaptive(choices), fresh(machine), batch, num_steps(batch))
    assert found.rate > 0.95 * best, found.chosen


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("fair draft", (0, 1, 2, 3)),
        ("useless draft", (0, 3)),
        ("large batch", (0, 1, 2, 3)),
    ],
)
def test_choosing_one_step_late_costs_little(name: str, choices: tuple[int, ...]) -> None:
    """What a step makes, and so what the next one verifies, from all steps but the last."""
    machine, batch = SITUATIONS[name]
    best = max(rate_of(n, machine, batch) for n in choices)
    policy = adaptive(choices, padded=choices)
    found = run(policy, fresh(machine), batch, num_steps(batch), is_ahead=True, padded=choices)
    assert found.rate > 0.95 * best, found.chosen


@pytest.mark.parametrize("padded", [(), (0, 1, 2, 3)], ids=["exact", "padded"])
@pytest.mark.parametrize("source", ["eagle3", "lookup"])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_never_slower_than_off(batch: int, source: str, padded: tuple[int, ...]) -> None:
    """Within 3 % once it is known that drafts are wrong, however sure their source is of them."""
    machine = Machine(acceptance={source: 0.0}, lies=True, mix={source: 1.0})
    # Nothing is made without speculation, not even the draft's KV.
    off = rate_of(0, replace(machine, draft=(0.0, 0.0)), batch)
    policy, machine = adaptive((0, 1, 2, 3), padded=padded), fresh(machine)
    run(policy, machine, batch, 150, padded=padded)
    found = run(policy, machine, batch, num_steps(batch), padded=padded)
    assert found.rate > 0.97 * off, found.chosen


def test_sure_drafts_of_a_lookup_are_verified_where_others_are_not() -> None:
    """Rows are dear, so that only what is likely to be accepted pays."""
    machine = Machine(step=(0.010, 0.002), acceptance={"lookup": 0.9}, mix={"lookup": 1.0})
    policy = adaptive(spread_numbers(15), made=0)
    run(policy, machine, 1, 300)
    numbers = policy.choose(1, 1)
    assert len(Continuation([0] * 15, [0.95] * 15).likely(numbers.least).token_ids) > 8
    assert len(Continuation([0] * 15, [0.1] * 15).likely(numbers.least).token_ids) <= 1
    # What it promised and did not keep counts.
    machine.acceptance, machine.lies = {"lookup": 0.2}, True
    run(policy, machine, 1, 1500)
    assert policy.choose(1, 1).least > 2 * numbers.least


def test_sequences_of_a_lookup_need_no_drafts_of_the_proposer() -> None:
    policy = adaptive((0, 1, 2, 3))
    assert policy.choose(2, 2) == DraftNumbers(0, 3, 3, 0.0)
    assert policy.choose(1, 2).made == 3
    assert FixedDrafts(3, 15).choose(2, 2) == DraftNumbers(0, 15, 15, 0.0)
    assert FixedDrafts(3, 15).choose(1, 2) == DraftNumbers(3, 15, 15, 0.0)


def test_totals_are_few_until_others_recur() -> None:
    """Each is recorded for itself: the longest drafts lose some."""
    policy = adaptive(spread_numbers(15), made=0, recording=lambda: 0.0)
    numbers = policy.choose(4, 4)

    def fit(*counts: int) -> list[int]:
        return policy.fit(numbers, [Candidates("lookup", n) for n in counts])

    assert fit(15, 0, 1, 0) == [15, 0, 1, 0]
    assert fit(15, 15, 15, 14) == [14, 15, 15, 14]
    assert [fit(15, 1, 1, 0) for _ in range(8)] == 7 * [[14, 1, 1, 0]] + [[15, 1, 1, 0]]
    assert fit() == []


def test_recorded_steps_are_not_padded() -> None:
    """A step that is padded, or launched ahead, verifies what was made: nothing may be cut."""
    with pytest.raises(ValueError, match="nothing pads them"):
        adaptive((0, 3), padded=(0, 3), recording=lambda: 0.0)
    policy = adaptive((0, 1, 2, 3), padded=(0, 1, 2, 3))
    numbers = DraftNumbers(3, 3, 3)
    assert policy.fit(numbers, [Candidates("eagle3", n) for n in (3, 3, 3, 2)]) == [3, 3, 3, 2]
    assert resting(policy, 100) == []


def test_acceptance_by_position() -> None:
    """Positions that are rarely seen are as the one before; what was not made is not accepted."""
    policy = adaptive((0, 1, 2, 3))
    numbers = policy.choose(0, 1)
    for accepted in (3, 1) * 200:
        policy.fit(numbers, [Candidates("eagle3", 3)])
        policy.observe(numbers, [Verification("eagle3", 3, accepted)], None)
    expected = policy._acceptance["eagle3"].expected()
    assert [drafts for drafts, _ in expected] == [0, 1, 2, 3]
    assert [accepted for _, accepted in expected] == pytest.approx([0, 1, 1.5, 2], abs=0.05)
    for _ in range(200):
        policy.fit(numbers, [Candidates("lookup", 1)])
        policy.observe(numbers, [Verification("lookup", 1, 1)], None)
    expected = policy._acceptance["lookup"].expected()
    assert expected[3] == (pytest.approx(1, abs=0.05), pytest.approx(1, abs=0.05))


@pytest.mark.parametrize("accepted", [2, 3, 5])
def test_drafts_that_a_grammar_made_longer_are_known_as_far_as_others(accepted: int) -> None:
    policies = [adaptive((0, 1, 2, 3)) for _ in range(2)]
    for policy, num_drafts in zip(policies, (5, 3), strict=True):
        verified = Verification("eagle3", num_drafts, min(accepted, num_drafts))
        policy.observe(policy.choose(0, 1), [verified], None)
    found, expected = (policy._acceptance["eagle3"].expected() for policy in policies)
    assert found == expected


def resting(policy: DraftPolicy, steps: int, num_sequences: int = 1) -> list[int]:
    """How long the rests are, ended ones, if drafts never bring anything."""
    found = [0]
    for _ in range(steps):
        policy.begin(num_sequences, is_steady=True)
        found[-1] += policy.is_resting
        if not policy.is_resting:
            policy.fit(DraftNumbers(), [Candidates("eagle3", 0)] * num_sequences)
            found.append(0)
    return [each for each in found[:-1] if each]


def test_rests_last_longer_and_longer_up_to_a_bound() -> None:
    policy = adaptive((0, 3), recording=lambda: 0.0)
    assert resting(policy, 30 + 3 * 32 + 1) == [1, 3, 7, 15, 31, 31, 31]
    assert resting(policy, 60, num_sequences=2) == [1, 3, 7, 15]
    assert resting(adaptive((0, 3)), 100) == []


def test_drafts_and_new_sequences_end_a_rest() -> None:
    policy = adaptive((0, 3), recording=lambda: 0.0)
    resting(policy, 64)
    policy.begin(0, is_steady=True)
    assert not policy.is_resting
    policy.begin(1, is_steady=False)
    assert not policy.is_resting
    policy.fit(DraftNumbers(), [Candidates("eagle3", 0)])
    policy.begin(1, is_steady=True)
    assert policy.is_resting
    policy.begin(1, is_steady=False)
    policy.fit(DraftNumbers(3, 3, 3), [Candidates("eagle3", 3)])
    assert resting(policy, 16) == [1, 3, 7]


TROUBLES: dict[str, Machine] = {
    "slow beginning": Machine(slowness=lambda step: 5.0 if step < 10 else 1.0),
    "fading slowness": Machine(slowness=lambda step: 1 + 9 * 0.8**step),
    "slow first runs": Machine(first_run=0.05),
    "slower midway": Machine(slowness=lambda step: 1.0 if step < 700 else 2.0),
    "faster midway": Machine(slowness=lambda step: 2.0 if step < 700 else 1.0),
    "now fast, now slow": Machine(slowness=lambda step: 1.0 + step // 300 % 2),
}


@pytest.mark.parametrize("choices", [(0, 1, 2, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.parametrize("draft", ["cheap", "dear"])
def test_times_that_change_do_not_mislead(draft: str, name: str, choices: tuple[int, ...]) -> None:
    machine = replace(TROUBLES[name], acceptance={"eagle3": 0.5})
    if draft == "dear":
        machine = replace(machine, draft=(0.004, 0.0001))
    best = max(rate_of(n, machine, 1) for n in choices)
    found = run(adaptive(choices), fresh(machine), 1, num_steps(1))
    assert found.rate > 0.95 * best, found.chosen


@pytest.mark.parametrize("choices", [(0, 1, 2, 3), (0, 3)], ids=str)
def test_it_follows_the_cost_of_drafts(choices: tuple[int, ...]) -> None:
    """A draft that is cheap, then dear, then cheap again."""
    policy = adaptive(choices)
    for seconds, expected in ((0.0005, 3), (0.02, 0), (0.0005, 3)):
        machine = Machine(draft=(seconds, 0.0001), acceptance={"eagle3": 0.8})
        run(policy, machine, 1, 1500)
        settled = run(policy, machine, 1, 300).chosen
        assert settled.most_common(1)[0][0] == expected


def test_what_is_nearly_best_is_not_only_tried() -> None:
    """A best that is only just best is chosen: what its drafts become is measured on."""
    policy = adaptive((0, 1))
    machine = Machine(step=(0.01, 0.0), draft=(0.005, 0.0), noise=0.0)
    machine.acceptance = {"eagle3": 0.5}
    for _ in range(20):
        assert run(policy, machine, 1, 100).chosen[1] > 0


@pytest.mark.parametrize("batch", [1, 16])
def test_it_follows_a_change(batch: int) -> None:
    """Text that is easy, then hopeless, then easy again."""
    policy = adaptive((0, 1, 2, 3))
    machine = Machine(step=(0.01, 0.0004))
    for acceptance, expected in ((0.9, 3), (0.0, 0), (0.9, 3)):
        machine.acceptance = {"eagle3": acceptance}
        run(policy, machine, batch, 1500)
        settled = run(policy, machine, batch, 300).chosen
        assert settled.most_common(1)[0][0] == expected
        assert settled[expected] > 150  # a neighbour that is nearly as good is tried often


def test_the_batch_decides() -> None:
    """The same draft pays for one sequence and not for many: no memory of the other batch."""
    policy = adaptive((0, 1, 2, 3))
    machine = Machine(step=(0.01, 0.004), acceptance={"eagle3": 0.5})
    for _ in range(3):
        assert run(policy, machine, 1, 400).chosen.most_common(1)[0][0] > 0
        assert run(policy, machine, 32, 400).chosen.most_common(1)[0][0] == 0


def test_sources_are_told_apart() -> None:
    """With a lookup worth verifying and a draft that is not, steps differ."""
    policy = adaptive((0, 1, 2, 3))
    machine = Machine(
        acceptance={"eagle3": 0.03, "lookup": 0.9}, mix={"eagle3": 0.5, "lookup": 0.5}
    )
    run(policy, machine, 1, 1500)
    assert policy.choose(1, 1).most == 3
    assert policy.choose(1, 1).least < 0.4
    chosen = Counter(policy.choose(0, 1).made for _ in range(100))
    assert chosen.most_common(1)[0][0] == 0


def measured(times: StepTimes, script: list[tuple[int, int]]) -> StepTimes:
    """After steps that verify 0 to 3 drafts in 10 to 13 ms and make them in 0 to 6 ms."""
    for verified, made in script:
        times.observe(verified, made, 0.010 + 0.001 * verified + 0.002 * made)
    return times


def test_a_single_try_shows_what_a_choice_costs() -> None:
    """What a step took that made one number and verified another is told apart."""
    script = [(3, 3)] * 50 + [(3, 0), (0, 3)] * 2 + [(3, 3)]
    times = measured(StepTimes((0, 3), (0, 3), 1), script)
    assert times.at(3, 3) == pytest.approx(0.019, rel=0.01)
    assert times.at(0, 0) == pytest.approx(0.010, rel=0.03)


def test_numbers_between_are_guessed_from_others() -> None:
    script = [(3, 3)] * 10 + [(3, 0), (0, 0), (0, 3), (3, 3)] * 5
    times = measured(StepTimes((0, 1, 2, 3), (0, 1, 2, 3), 1), script)
    assert times.at(1, 1) == pytest.approx(0.013, rel=0.1)
    assert times.at(2, 2) == pytest.approx(0.016, rel=0.1)


def test_another_batch_begins_with_what_is_known_of_the_nearest() -> None:
    known = measured(StepTimes((0, 3), (0, 3), 4), [(3, 3)] * 3)
    assert not StepTimes((0, 3), (0, 3), 5).is_known
    guessed = StepTimes((0, 3), (0, 3), 5, known)
    assert guessed.is_known
    # Twice as many rows per level for twice the sequences: a step of each total takes what it took.
    double = StepTimes((0, 3), (0, 3), 8, known)
    assert double.at(0, 0) == pytest.approx(known.at(0, 0) + (known.at(3, 0) - known.at(0, 0)) / 3)
    assert guessed.at(3, 3) - guessed.at(3, 0) == pytest.approx(known.at(3, 3) - known.at(3, 0))
    for _ in range(4):
        guessed.observe(3, 3, 5.0)
    assert guessed.at(3, 3) == pytest.approx(5)


def test_an_interrupted_step_says_little() -> None:
    times = StepTimes((0, 1), (0, 1), 1)
    for _ in range(50):
        for verified, made in ((1, 1), (1, 0), (0, 0), (0, 1)):
            times.observe(verified, made, 1 + 0.1 * verified + 0.2 * made)
    before = times.at(0, 0) / times.at(1, 1)
    times.observe(1, 1, 130.0)
    assert times.at(0, 0) / times.at(1, 1) == pytest.approx(before, rel=0.03)
    for _ in range(8):
        times.observe(1, 1, 1.3)
    assert times.at(1, 1) == pytest.approx(1.3, rel=0.06)
    for _ in range(100):
        times.observe(1, 1, 3.0)
    assert times.at(1, 1) == pytest.approx(3, abs=0.1)


def test_first_runs_are_forgotten() -> None:
    """Of a batch, and of a number of drafts in it."""
    times = StepTimes((0, 2), (0, 2), 1)
    times.observe(0, 2, 9.0)
    times.observe(2, 2, 9.0)
    assert not times.is_known
    times.observe(2, 2, 1.0)
    assert times.at(2, 2) == pytest.approx(1)
    before = times.at(0, 0)
    times.observe(2, 0, 9.0)
    assert times.at(0, 0) == before


def test_lengths_worth_telling_apart() -> None:
    assert spread_numbers(1) == (0, 1)
    assert spread_numbers(3) == (0, 1, 2, 3)
    assert spread_numbers(15) == (0, 1, 2, 3, 4, 6, 8, 12, 15)


@pytest.mark.parametrize("choices", [(), (0,), (1, 2), (0, 3, 2), (0, 0, 1)])
def test_choices_that_make_no_sense(choices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending numbers of drafts from 0"):
        AdaptiveDrafts(choices, "eagle3", made=3)
