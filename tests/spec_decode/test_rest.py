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
from atom.spec_decode.draft_policy import AdaptiveDrafts, DraftNumbers, Verification
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import NullProposer
from atom.spec_decode.suffix_lookup import RecentOutputs, SuffixLookup


class Idle(AdaptiveDrafts):
    """Chooses no drafts, and keeps what it learns of times."""

    def __init__(self) -> None:
        super().__init__((0, 3), "draft", "lookup", made=3, recording=lambda: 0.0)
        self.seconds: list[float | None] = []

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        return DraftNumbers()

    def observe(
        self, numbers: DraftNumbers, verified: Sequence[Verification], seconds: float | None
    ) -> None:
        super().observe(numbers, verified, seconds)
        if verified:
            self.seconds.append(seconds)


def drafter_of(policy: Idle, recent: RecentOutputs | None) -> Drafter:
    proposer = NullProposer(Lookahead(3))
    proposer.reads_steps = True
    lookup = SuffixLookup("lookup", 3, recent)
    return Drafter(proposer, "draft", lookup, policy, sync_is_free=True)


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
    policy = Idle()
    drafter = drafter_of(policy, None)
    while not step(drafter, ONE, [], 0.005):
        pass
    assert not any(step(drafter, NONE, [], 1e-6) for _ in range(50))
    for _ in range(10):
        step(drafter, ONE, [], 0.005)
    assert set(policy.seconds) == {0.005}


def test_there_is_no_rest_before_a_new_sequence_is_sampled() -> None:
    """Its prompt is computed in parts, and meanwhile the only other sequence ends."""
    drafter = drafter_of(Idle(), None)
    while not step(drafter, ONE, [], 0.005):
        pass
    (one,) = ONE.sequences
    new = NewSequence("two", 1, [1, 2, 3, 4], [], SamplingParams(), 0)
    prompt = [
        ScheduledSequence("two", 1, tokens, start, [], 1, wants_sample=start == 2)
        for start, tokens in enumerate(([1], [2], [3, 4]))
    ]
    for batch in (
        ScheduledBatch([one, prompt[0]], [new], []),
        ScheduledBatch([one, prompt[1]], [], []),
        ScheduledBatch([prompt[2]], [], [0]),
    ):
        drafter.start(batch)
        assert not drafter.is_at_rest
        drafter.merge(drafter.begin_with([None]), [0], [None], [])
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
        assert drafter.lookup.num_tokens == 0
