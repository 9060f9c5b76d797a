"""Steps at rest: when there are any, and that nothing is lost in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atom.batch import (
    Lookahead,
    NewSequence,
    ScheduledBatch,
    ScheduledSequence,
    SequenceResult,
    StepOutput,
)
from atom.sampling_params import SamplingParams
from atom.spec_decode.draft_length import Candidates, Choice
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import NullProposer
from atom.spec_decode.rest import Rest
from atom.spec_decode.suffix_lookup import RecentOutputs, SuffixLookup


def rests(rest: Rest, steps: int, num_sequences: int = 1) -> list[bool]:
    """Which of so many steps rest, if none of the others asks for drafts."""
    found = []
    for _ in range(steps):
        rest.begin(num_sequences, starts=False)
        found.append(rest.is_on)
        if not rest.is_on:
            rest.chosen(0)
    return found


def lengths(found: list[bool]) -> list[int]:
    """Of the rests, ended ones."""
    runs = "".join("r" if each else "." for each in found).split(".")
    return [len(run) for run in runs[:-1] if run]


def test_rests_last_longer_and_longer_up_to_a_bound() -> None:
    assert lengths(rests(Rest(), 30 + 3 * 32 + 1)) == [1, 3, 7, 15, 31, 31, 31]


def test_drafts_end_what_made_them_long() -> None:
    rest = Rest()
    rests(rest, 30)
    while rest.is_on:
        rest.begin(1, starts=False)
    rest.chosen(2)
    assert rests(rest, 3) == [False, True, False]


def test_another_number_of_sequences_begins_anew() -> None:
    rest = Rest()
    rests(rest, 30)
    assert lengths(rests(rest, 31, num_sequences=2)) == [1, 3, 7, 15]


def test_a_new_sequence_is_looked_at_once() -> None:
    """Though as many as before are drafted for; if that brings nothing the rest is a long one."""
    rest = Rest()
    rests(rest, 40)
    assert rest.is_on
    rest.begin(1, starts=True)
    assert not rest.is_on
    rest.chosen(0)
    assert lengths(rests(rest, 40)) == [31]


def test_steps_that_draft_for_nobody_do_not_rest() -> None:
    """Of prompts, of requests without drafts, or of nothing at all; a rest goes on behind them."""
    rest = Rest()
    rests(rest, 40)
    assert rest.is_on
    rest.begin(0, starts=False)
    assert not rest.is_on
    rest.begin(1, starts=False)
    assert rest.is_on


def test_times_are_those_of_as_many_sequences() -> None:
    rest = Rest()
    rest.begin(1, starts=False)
    rest.ended(0.1)
    rest.ended(None)
    assert rest.take() == [0.1, None]
    assert rest.take() == []
    rest.ended(0.1)
    rest.begin(2, starts=False)
    assert rest.take() == []


class Idle:
    """Chooses no drafts, and keeps what it learns of rests."""

    def __init__(self) -> None:
        self.rested: list[float | None] = []

    def choose(self, sources: Sequence[str], *, drafts: bool) -> Choice:
        return Choice(0, 0)

    def rest(self, num_sequences: int, seconds: Sequence[float | None]) -> None:
        self.rested += seconds

    def cut(self, choice: Choice, made: Sequence[Candidates]) -> list[int]:
        return [0] * len(made)

    def observe(self, *_: object) -> None:
        pass


def drafter_of(length: Idle, recent: RecentOutputs | None) -> Drafter:
    proposer = NullProposer(Lookahead(3))
    proposer.reads_steps = True
    lookup = SuffixLookup("lookup", 3, recent)
    return Drafter(proposer, "draft", lookup, length, waiting_is_free=True, rests=True)


def step(drafter: Drafter, batch: ScheduledBatch, outputs: list[int], seconds: float) -> bool:
    """Whether one step of the sequence in row 0 was at rest, or of no sequence."""
    drafter.start(batch)
    rows = [0] * len(batch.sequences)
    found = drafter.look_up(rows, [([1, 2, 3], outputs)] * len(rows)) if rows else []
    numbers = drafter.begin_with(found)
    drafter.merge(numbers, rows, found, [])
    drafter.observe(batch, StepOutput([SequenceResult([5]) for _ in rows], 0), seconds)
    return drafter.is_at_rest


ONE = ScheduledBatch(
    [ScheduledSequence("one", 0, [5], 3, [], 1, wants_sample=True, wants_drafts=True)], [], []
)
NONE = ScheduledBatch([], [], [])


def test_what_empty_steps_take_says_nothing() -> None:
    """They run while a grammar is compiled, or where other engines need this one."""
    length = Idle()
    drafter = drafter_of(length, None)
    while not step(drafter, ONE, [], 0.005):
        pass
    assert not any(step(drafter, NONE, [], 1e-6) for _ in range(50))
    for _ in range(10):
        step(drafter, ONE, [], 0.005)
    assert set(length.rested) == {0.005}


def test_there_is_no_rest_before_a_new_sequence_is_sampled() -> None:
    """Its prompt is computed in parts, and meanwhile the only other sequence ends."""
    drafter = drafter_of(Idle(), None)
    while not step(drafter, ONE, [], 0.005):
        pass
    (one,) = ONE.sequences
    new = NewSequence("two", 1, [1, 2, 3], [], SamplingParams(), 0)
    prompt = [
        ScheduledSequence("two", 1, [token], start, [], 1, wants_sample=start == 2)
        for start, token in enumerate(new.prompt_token_ids)
    ]
    for batch in (
        ScheduledBatch([one, prompt[0]], [new], []),
        ScheduledBatch([one, prompt[1]], [], []),
        ScheduledBatch([prompt[2]], [], [0]),
    ):
        drafter.start(batch)
        assert not drafter.is_at_rest
        drafter.begin_with([None])
    drafter.start(ScheduledBatch([one], [], []))
    assert drafter.is_at_rest


@pytest.mark.parametrize("shares", [True, False])
def test_others_find_what_was_written_at_rest(shares: bool) -> None:
    """Also of a sequence all of whose steps were; without recent outputs nobody wants to know."""
    recent = RecentOutputs(1000) if shares else None
    drafter = drafter_of(Idle(), recent)
    for _ in range(60):
        step(drafter, ONE, [], 0.005)
    new = NewSequence("one", 0, [1, 2, 3], [], SamplingParams(), 0)
    drafter.start(ScheduledBatch([], [], [0]))
    drafter.start(ScheduledBatch([], [new], []))
    outputs = [10, 11, 12, 13]
    for count in range(1, 5):
        step(drafter, ONE, outputs[:count], 0.005)
    assert drafter.is_at_rest
    drafter.start(ScheduledBatch([], [], [0]))
    if recent is not None:
        # Its prompt's end, its outputs, and an end.
        assert recent.num_tokens >= 3 + 4 + 1
        assert recent.followers("", [1, 2, 3, 10], 3) == {(11, 12, 13): pytest.approx(1.5**4)}
    else:
        assert drafter.num_lookup_tokens == 0
