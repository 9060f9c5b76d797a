"""The adaptive length against a simulated machine: what it chooses, and what trying costs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from atom.spec_decode.lengths import (
    Acceptance,
    AdaptiveLength,
    CostCurve,
    DraftLength,
    FixedLength,
    Verification,
    spread_lengths,
)


@dataclass
class Machine:
    """Costs in seconds, and sequences whose drafts are accepted at random.

    Attributes:
        step: of a target step, and of each of its rows.
        draft: of a draft step, and of completing the draft's KV alone.
        acceptance: by source, of a draft whose predecessors were accepted.
        mix: the share of steps that a sequence spends on each source.
        noise: relative deviation of every time.
    """

    step: tuple[float, float] = (0.0100, 0.0004)
    draft: tuple[float, float] = (0.0008, 0.0001)
    acceptance: dict[str, float] = field(default_factory=lambda: {"eagle3": 0.65})
    mix: dict[str, float] = field(default_factory=lambda: {"eagle3": 1.0})
    noise: float = 0.1
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def verifying(self, num_sequences: int, num_drafts: int) -> float:
        base, per_row = self.step
        return base + per_row * num_sequences * (1 + num_drafts)

    def drafting(self, num_drafts: int) -> float:
        return self.draft[0] * num_drafts if num_drafts else self.draft[1]

    def accepted(self, source: str, num_drafts: int) -> int:
        count = 0
        while count < num_drafts and self.rng.random() < self.acceptance[source]:
            count += 1
        return count

    def jitter(self, seconds: float) -> float:
        return seconds * (1 + self.noise * abs(self.rng.gauss(0, 1)))


@dataclass
class Run:
    tokens: int = 0
    seconds: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(length: DraftLength, machine: Machine, batch: int, steps: int) -> Run:
    result = Run()
    names, shares = list(machine.mix), list(machine.mix.values())
    pending: list[tuple[str, int]] = []
    for _ in range(steps):
        sources = machine.rng.choices(names, shares, k=batch)
        drafts = "lookup" not in sources or "eagle3" in sources
        chosen = length.choose(sources, drafts=drafts)
        num_drafts = pending[0][1] if pending else 0
        seconds = machine.jitter(machine.verifying(batch, num_drafts))
        seconds += machine.jitter(machine.drafting(chosen if drafts else 0))
        verifications = [Verification(None, 0, 0)] * (batch - len(pending))
        for source, count in pending:
            verifications.append(Verification(source, count, machine.accepted(source, count)))
        length.observe(verifications, seconds)
        result.tokens += batch + sum(v.num_accepted for v in verifications)
        result.seconds += seconds
        result.chosen[chosen] += 1
        pending = [(source, chosen) for source in sources]
    return result


def num_steps(batch: int) -> int:
    return 2000 if batch < 8 else 400


def rate_of(num_drafts: int, machine: Machine, batch: int) -> float:
    return run(FixedLength(num_drafts), machine, batch, num_steps(batch)).rate


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
    found = run(AdaptiveLength(choices), machine, batch, num_steps(batch))
    assert found.rate > 0.95 * best, found.chosen


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
    assert max(length.choose(["lookup"], drafts=False) for _ in range(3)) == 3
    chosen = Counter(length.choose(["eagle3"], drafts=True) for _ in range(100))
    assert chosen.most_common(1)[0][0] == 0


def test_drafts_that_were_not_made_count_as_rejected() -> None:
    acceptance = Acceptance(3)
    for _ in range(200):
        acceptance.observe(3, 0, 0)
    assert acceptance.num_accepted(3) < 0.05
    assert acceptance.num_drafts(3) < 0.1
    acceptance.observe(0, 0, 0)  # nobody asked


def test_positions_are_measured_where_they_were_reached() -> None:
    acceptance = Acceptance(3)
    for _ in range(300):
        acceptance.observe(1, 1, 1)
    first = acceptance.num_accepted(1)
    assert first > 0.95
    # Nothing was learnt of the second, so it has the benefit of the doubt.
    assert 0.6 * first < acceptance.num_accepted(2) - first < 0.9 * first
    for _ in range(300):
        acceptance.observe(3, 3, 1)
    assert acceptance.num_accepted(3) == pytest.approx(1, abs=0.05)


def test_costs_between_and_beyond_what_was_measured() -> None:
    curve = CostCurve()
    assert curve.at(4) is None
    for _ in range(50):
        curve.observe(4, 1.0)
    assert curve.at(4) == pytest.approx(1)
    below, above = curve.at(1), curve.at(16)
    assert below is not None
    assert above is not None
    assert below < 1 < above
    for _ in range(50):
        curve.observe(8, 2.0)
    assert curve.at(6) == pytest.approx(1.5)


def test_an_interrupted_step_says_little() -> None:
    curve = CostCurve()
    for _ in range(50):
        curve.observe(1, 1.0)
    curve.observe(1, 100.0)
    assert curve.at(1) == pytest.approx(1.06, abs=0.01)
    for _ in range(100):
        curve.observe(1, 3.0)
    assert curve.at(1) == pytest.approx(3, abs=0.1)


def test_the_first_run_is_forgotten() -> None:
    curve = CostCurve()
    for seconds in (9.0, 1.0, 1.0):
        curve.observe(2, seconds)
    assert curve.at(2) == 1


def test_lengths_worth_telling_apart() -> None:
    assert spread_lengths(1) == (0, 1)
    assert spread_lengths(3) == (0, 1, 2, 3)
    assert spread_lengths(15) == (0, 1, 2, 3, 4, 6, 8, 12, 15)


@pytest.mark.parametrize("choices", [(), (0,), (1, 2), (0, 3, 2), (0, 0, 1)])
def test_choices_that_make_no_sense(choices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending numbers of drafts from 0"):
        AdaptiveLength(choices)
