"""The adaptive length against a simulated machine: what it chooses, and what trying costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from atom.spec_decode.cuts import CutByTotal, CutToLongest
from atom.spec_decode.draft_length import Candidates, Choice, DraftLength, Verification
from atom.spec_decode.first_runs import FirstRuns, StepShape
from atom.spec_decode.lengths import AdaptiveLength, spread_lengths
from atom.spec_decode.step_times import StepTimes


@dataclass
class Machine:
    """Costs in seconds, and sequences whose drafts are accepted at random.

    Attributes:
        step: of a target step, and of each of its rows.
        draft: of a draft step, and of completing the draft's KV alone.
        acceptance: by source, of a draft whose predecessors were accepted.
        tells: how much more likely a draft is accepted that looks good, and how much less one that
            looks bad; of 0 confidences say nothing.
        lies: drafts look good whatever they are.
        mix: the share of steps that a sequence spends on each source.
        noise: relative deviation of every time.
        slowness: factor of every time, by step.
        first_run: seconds that a number of rows, or of drafts, takes more the first time.
    """

    step: tuple[float, float] = (0.0100, 0.0004)
    draft: tuple[float, float] = (0.0008, 0.0001)
    acceptance: dict[str, float] = field(default_factory=lambda: {"eagle3": 0.65})
    tells: float = 0.0
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

    def drafts(self, source: str, count: int) -> tuple[list[float], int]:
        """Confidences of drafts, and how many of them the target would sample."""
        mean, confidences, hits = self.acceptance[source], [], []
        for _ in range(count):
            likely = min(max(mean + self.rng.choice((-1, 1)) * self.tells, 0.0), 1.0)
            confidences.append(0.97 if self.lies else 0.8 * likely)
            hits.append(self.rng.random() < likely)
        return confidences, (*hits, False).index(False)

    def jitter(self, seconds: float) -> float:
        return seconds * (1 + self.noise * abs(self.rng.gauss(0, 1)))


class FixedLength:
    """The same number at every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def rest(self, num_sequences: int, seconds: Sequence[float | None]) -> None:
        pass

    def choose(self, sources: Sequence[str], *, drafts: bool) -> Choice:
        return Choice(self._num_drafts, self._num_drafts if drafts else 0)

    def cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        return [len(own.confidences) for own in made]

    def observe(
        self, choice: Choice, verifications: Sequence[Verification], seconds: float | None
    ) -> None:
        """Nothing is learnt."""


@dataclass
class Run:
    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0
    chosen: Counter[int] = field(default_factory=Counter)
    shapes: set[StepShape] = field(default_factory=set)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(
    length: DraftLength, machine: Machine, batch: int, steps: int, *, is_ahead: bool = False
) -> Run:
    """Args:
    is_ahead: the next step chooses before this one has cut and been observed.
    """
    result = Run()
    names, shares = list(machine.mix), list(machine.mix.values())
    # Source, confidences of the drafts to verify, and how many of them are right.
    pending: list[tuple[str, list[float], int]] = []
    seen: set[tuple[str, int]] = set()
    unread: list[Callable[[], list[int]]] = []
    for step in range(steps):
        sources = machine.rng.choices(names, shares, k=batch)
        drafts = "lookup" not in sources or "eagle3" in sources
        choice = length.choose(sources, drafts=drafts)
        for read in unread:
            read()
        verified, made = sum(len(own) for _, own, _ in pending), choice.made
        seconds = machine.seconds(batch, verified, made)
        kinds = {("verified", verified), ("made", made)}
        seconds += machine.first_run * len(kinds - seen)
        seconds *= machine.slowness(step)
        seen |= kinds
        result.shapes.add(StepShape(batch, verified, made))
        verifications = [Verification(None, [], 0)] * (batch - len(pending))
        verifications += [Verification(*own) for own in pending]
        outcomes = [machine.drafts(source, choice.asked) for source in sources]
        candidates = [Candidates(s, own) for s, (own, _) in zip(sources, outcomes, strict=True)]

        def finish(
            choice: Choice = choice,
            candidates: list[Candidates] = candidates,
            verifications: list[Verification] = verifications,
            seconds: float = seconds,
        ) -> list[int]:
            kept = length.cut(choice, candidates)
            length.observe(choice, verifications, seconds)
            return kept

        if is_ahead:
            assert choice.verified is not None
            unread, kept = [finish], [min(choice.verified, choice.asked)] * batch
        else:
            kept = finish()
        result.tokens += batch + sum(v.num_accepted for v in verifications)
        result.seconds += seconds
        result.chosen[choice.asked] += 1
        result.rows += sum(kept)
        pending = [
            (source, own[:count], min(right, count))
            for source, (own, right), count in zip(sources, outcomes, kept, strict=True)
        ]
    return result


def fresh(machine: Machine) -> Machine:
    """Whose accidents do not depend on what ran before."""
    return replace(machine, rng=random.Random(0))


def num_steps(batch: int) -> int:
    return 2000 if batch < 8 else 400


def rate_of(num_drafts: int, machine: Machine, batch: int) -> float:
    return run(FixedLength(num_drafts), fresh(machine), batch, num_steps(batch)).rate


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


@pytest.mark.parametrize("choices", [(0, 1, 2, 3), (0, 3), spread_lengths(7)], ids=str)
@pytest.mark.parametrize("name", SITUATIONS)
def test_no_fixed_number_is_five_percent_faster(name: str, choices: tuple[int, ...]) -> None:
    """Its own beginning included."""
    machine, batch = SITUATIONS[name]
    best = max(rate_of(n, machine, batch) for n in choices)
    found = run(AdaptiveLength(choices), fresh(machine), batch, num_steps(batch))
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
    """What a step makes, and how many of them the next one verifies, from all steps but the last;
    each measured time goes to the choices of its own step.
    """
    machine, batch = SITUATIONS[name]
    best = max(rate_of(n, machine, batch) for n in choices)
    length = AdaptiveLength(choices, CutToLongest(choices), is_ahead=True)
    found = run(length, fresh(machine), batch, num_steps(batch), is_ahead=True)
    assert found.rate > 0.95 * best, found.chosen


def test_a_choice_ahead_is_cut_as_it_was_chosen() -> None:
    """Whatever the confidences are, since the next step runs already."""
    length = AdaptiveLength((0, 3), CutToLongest((0, 3)), is_ahead=True)
    choice = length.choose(["eagle3"] * 2, drafts=True)
    assert choice.verified == choice.asked == 3
    poor, few = Candidates("eagle3", [0.01] * 3), Candidates("eagle3", [0.9])
    assert length.cut(choice, [poor, few]) == [3, 1]
    assert length.cut(msgspec.structs.replace(choice, verified=1), [poor, few]) == [1, 1]


@pytest.mark.parametrize(
    ("machine", "batch", "gain"),
    [
        (Machine(step=(0.01, 0.001), acceptance={"eagle3": 0.5}, tells=0.45), 1, 1.0),
        (Machine(step=(0.01, 0.001), acceptance={"eagle3": 0.5}, tells=0.45), 8, 1.05),
        (Machine(acceptance={"eagle3": 0.7}, tells=0.28), 64, 1.02),
    ],
    ids=["alone", "eight", "many"],
)
def test_confidences_beat_every_fixed_number(machine: Machine, batch: int, gain: float) -> None:
    """Drafts that tell how good they are: those of eight sequences pay where no number does."""
    best = max(rate_of(n, machine, batch) for n in (0, 1, 2, 3))
    length, machine = AdaptiveLength((0, 1, 2, 3)), fresh(machine)
    run(length, machine, batch, 100)
    assert run(length, machine, batch, num_steps(batch)).rate > gain * best


@pytest.mark.parametrize("rule", [CutByTotal, CutToLongest])
@pytest.mark.parametrize("lies", [True, False], ids=["lying", "useless"])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_never_slower_than_off(batch: int, lies: bool, rule: type[CutByTotal]) -> None:
    """Within 3 % once it is known that drafts are wrong, however sure their source is of them."""
    machine = Machine(acceptance={"eagle3": 0.0}, lies=lies)
    # Nothing is made without speculation, not even the draft's KV.
    off = rate_of(0, replace(machine, draft=(0.0, 0.0)), batch)
    length, machine = AdaptiveLength((0, 1, 2, 3), rule((0, 1, 2, 3))), fresh(machine)
    run(length, machine, batch, 150)
    assert run(length, machine, batch, num_steps(batch)).rate > 0.97 * off


def test_totals_are_those_of_the_likeliest_drafts() -> None:
    rule = CutByTotal((0, 1, 2, 3))
    drafts = [[0.9, 0.8, 0.1], [0.2], [0.85, 0.3, 0.25], []]
    gains = rule.gains(drafts)
    cuts = {level: rule.cut(drafts, level) for level in gains}
    # Every total is a step, and each takes the best drafts there are.
    assert {sum(kept): kept for kept in cuts.values()} == {
        0: [0, 0, 0, 0],
        1: [1, 0, 0, 0],
        2: [1, 0, 1, 0],
        4: [2, 0, 2, 0],
        6: [2, 1, 3, 0],
    }
    for level, kept in cuts.items():
        assert rule.level_of(kept) == level
        best = sum(sum(own[:n]) for own, n in zip(drafts, kept, strict=True))
        assert gains[level] == (sum(kept), pytest.approx(best))
    assert rule.level_of([3, 0, 0, 0]) is None


def test_in_graphs_the_longest_counts() -> None:
    rule = CutToLongest((0, 3))
    drafts = [[0.9, 0.8], [0.2]]
    assert rule.gains(drafts) == {0: (0, 0), 3: (3, pytest.approx(1.9))}
    assert [rule.cut(drafts, level) for level in (0, 3)] == [[0, 0], [2, 1]]
    assert rule.level_of([0, 0]) == 0
    assert rule.level_of([0, 1]) == 3
    assert rule.level_of([4, 1]) is None


def test_a_step_whose_drafts_are_all_forced_is_cut_to_nothing() -> None:
    """Nothing is left to choose, whatever was chosen."""
    length = AdaptiveLength((0, 3), CutToLongest((0, 3)))
    assert length.cut(Choice(3, 3, 3, rate=100.0), []) == []
    assert length.cut(Choice(3, 3), []) == []


def test_in_graphs_a_number_between_is_verified_where_it_pays() -> None:
    """With dear rows one or two are better than three, and than none."""
    machine = Machine(step=(0.02, 0.0006), acceptance={"eagle3": 0.7})

    def rate(*levels: int) -> float:
        length, own = AdaptiveLength((0, 3), CutToLongest(levels)), fresh(machine)
        run(length, own, 32, 100)
        return run(length, own, 32, 200).rate

    assert rate(0, 1, 2, 3) > 1.04 * rate(0, 3)


def test_new_shapes_are_run_where_they_pay() -> None:
    """Each takes much longer the first time, so a batch that soon ends runs few of them."""

    def shapes(first_runs: FirstRuns | None) -> int:
        length = AdaptiveLength((0, 1, 2, 3), first_runs=first_runs)
        found = set()
        for batch in (8, 7, 6, 5, 4, 3, 2, 1):
            machine = Machine(step=(0.01, 0.001), acceptance={"eagle3": 0.5}, tells=0.45)
            found |= run(length, machine, batch, 20).shapes
        return len(found)

    assert shapes(FirstRuns(lambda: 0.02, 128)) < 0.6 * shapes(None)


def test_shapes_that_are_dropped_are_new_again() -> None:
    """Those that were run last are kept; the steps of the others count on."""
    runs = FirstRuns(lambda: 3.0, 2)
    first, second, third = (StepShape(4, n, 1) for n in (0, 1, 2))
    assert runs.seconds(first) == runs.share(first) == 3.0
    for shape in (first, second, first, third):
        runs.ran(shape)
    assert [runs.seconds(shape) for shape in (first, second, third)] == [0.0, 3.0, 0.0]
    assert runs.share(second) == 3 / (1 + 4 / 8)


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
    found = run(AdaptiveLength(choices), fresh(machine), 1, num_steps(1))
    assert found.rate > 0.95 * best, found.chosen


@pytest.mark.parametrize("choices", [(0, 1, 2, 3), (0, 3)], ids=str)
def test_it_follows_the_cost_of_drafts(choices: tuple[int, ...]) -> None:
    """A draft that is cheap, then dear, then cheap again."""
    length = AdaptiveLength(choices)
    for seconds, expected in ((0.0005, 3), (0.02, 0), (0.0005, 3)):
        machine = Machine(draft=(seconds, 0.0001), acceptance={"eagle3": 0.8})
        run(length, machine, 1, 1500)
        settled = run(length, machine, 1, 300).chosen
        assert settled.most_common(1)[0][0] == expected


def test_what_is_nearly_best_is_not_only_tried() -> None:
    """A best that is only just best is chosen: what its drafts become is measured on."""
    length = AdaptiveLength((0, 1))
    machine = Machine(step=(0.01, 0.0), draft=(0.005, 0.0), noise=0.0)
    machine.acceptance = {"eagle3": 0.5}
    for _ in range(20):
        assert run(length, machine, 1, 100).chosen[1] > 0


@pytest.mark.parametrize("batch", [1, 16])
def test_it_follows_a_change(batch: int) -> None:
    """Text that is easy, then hopeless, then easy again."""
    length = AdaptiveLength((0, 1, 2, 3))
    machine = Machine(step=(0.01, 0.0004))
    for acceptance, expected in ((0.9, 3), (0.0, 0), (0.9, 3)):
        machine.acceptance = {"eagle3": acceptance}
        run(length, machine, batch, 1500)
        settled = run(length, machine, batch, 300).chosen
        assert settled.most_common(1)[0][0] == expected
        assert settled[expected] > 150  # a neighbour that is nearly as good is tried often


def test_the_batch_decides() -> None:
    """The same draft pays for one sequence and not for many: no memory of the other batch."""
    length = AdaptiveLength((0, 1, 2, 3))
    machine = Machine(step=(0.01, 0.004), acceptance={"eagle3": 0.5})
    for _ in range(3):
        assert run(length, machine, 1, 400).chosen.most_common(1)[0][0] > 0
        assert run(length, machine, 32, 400).chosen.most_common(1)[0][0] == 0


def test_sources_are_told_apart() -> None:
    """With a lookup worth verifying and a draft that is not, steps differ."""
    length = AdaptiveLength((0, 1, 2, 3))
    machine = Machine(
        acceptance={"eagle3": 0.03, "lookup": 0.9}, mix={"eagle3": 0.5, "lookup": 0.5}
    )
    run(length, machine, 1, 1500)
    assert max(length.choose(["lookup"], drafts=False).asked for _ in range(3)) == 3
    chosen = Counter(length.choose(["eagle3"], drafts=True).asked for _ in range(100))
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
    assert spread_lengths(1) == (0, 1)
    assert spread_lengths(3) == (0, 1, 2, 3)
    assert spread_lengths(15) == (0, 1, 2, 3, 4, 6, 8, 12, 15)


@pytest.mark.parametrize("choices", [(), (0,), (1, 2), (0, 3, 2), (0, 0, 1)])
def test_choices_that_make_no_sense(choices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending numbers of drafts from 0"):
        AdaptiveLength(choices)
