"""When blocks and rows come back: of sequences in flight, of preempted ones, after failures."""

from __future__ import annotations

import pytest
from model_engine.scheduler_harness import A, Bench, tokens

from atom.batch import (
    LaunchedStep,
    Lookahead,
    ScheduledSequence,
    SequenceResult,
    StepOutput,
)
from atom.model_engine.scheduling.suspects import Suspects
from atom.model_engine.sequence import LaunchedParts


def never() -> StepOutput:
    raise AssertionError("this test reads no step")


BEFORE = LaunchedStep(never)


def test_what_is_aborted_in_flight_keeps_blocks_and_row_until_its_step_is_read() -> None:
    bench = Bench(enable_prefix_caching=False)
    bench.add("a", tokens(100, 6), max_tokens=9)
    first = bench.scheduler.schedule()
    second = bench.scheduler.schedule(BEFORE)
    assert second.sequences[0].is_ahead
    held = bench.pool.num_used
    bench.scheduler.abort(["a"])
    assert bench.pool.num_used == held > 0
    bench.scheduler.check_integrity()
    bench.scheduler.update(first, StepOutput([SequenceResult([A])]))
    # The second step writes to its blocks yet.
    assert bench.pool.num_used == held
    assert bench.scheduler.update(second, StepOutput([SequenceResult([A])])) == []
    assert bench.pool.num_used == 0
    assert bench.scheduler.schedule().freed_rows == [first.sequences[0].row]
    bench.scheduler.check_integrity()


def test_a_preempted_sequence_holds_nothing() -> None:
    """Two sequences that fit only at first: the later one gives all back, and starts anew."""
    bench = Bench(num_blocks=4, enable_prefix_caching=False)
    bench.add("a", tokens(100, 6), max_tokens=9, ignore_eos=True)
    bench.add("b", tokens(200, 4), max_tokens=9, ignore_eos=True)
    batch, _ = bench.step()
    for _ in range(12):
        if bench.scheduler.stats().num_preemptions:
            break
        batch, _ = bench.step()
    assert bench.scheduler.stats().num_preemptions == 1
    assert [s.id for s in batch.sequences] == ["a"]
    assert bench.pool.num_used == batch.sequences[0].num_blocks
    bench.run()


def test_drafts_accepted_before_a_failure_count_and_their_tokens_are_dropped() -> None:
    bench = Bench(lookahead=Lookahead(2))
    bench.add("a", tokens(100, 4), max_tokens=20)
    bench.step(drafts=[A, A])
    batch = bench.scheduler.schedule()
    assert batch.sequences[0].num_drafts == 2
    result = SequenceResult([A], failure="no token can be chosen")
    assert bench.scheduler.update(batch, StepOutput([result])) == []
    (refused,) = bench.scheduler.take_refused()
    assert refused.id == "a"
    stats = bench.scheduler.stats().spec_decode
    assert stats is not None
    assert stats.num_draft_tokens == 2
    assert stats.accepted_counts == [0, 1, 0]
    assert bench.pool.num_used == 0
    bench.scheduler.check_integrity()


def test_suspects_that_fail_again_stand_in_smaller_groups_only() -> None:
    bench = Bench()
    for id in "abcd":
        bench.add(id, tokens(ord(id), 4))
    a, b, c, d = bench.scheduler._live.values()
    suspects = Suspects()
    suspects.add([a, b, c, d], one_by_one=False)
    assert [[*group] for group in suspects.groups] == [["a", "b"], ["c", "d"]]
    suspects.add([a, b], one_by_one=False)
    assert [[*group] for group in suspects.groups] == [["a"], ["b"], ["c", "d"]]
    suspects.add([c, d], one_by_one=True)
    assert [[*group] for group in suspects.groups] == [["c"], ["d"], ["a"], ["b"]]


def test_drafts_keep_their_source_until_they_are_verified() -> None:
    bench = Bench(lookahead=Lookahead(2))
    bench.add("a", tokens(100, 4), max_tokens=20)
    first = bench.scheduler.schedule()
    made = SequenceResult([A], draft_token_ids=[A, A], draft_source="lookup")
    bench.scheduler.update(first, StepOutput([made]))
    second = bench.scheduler.schedule()
    assert (second.sequences[0].num_drafts, second.sequences[0].draft_source) == (2, "lookup")
    bench.scheduler.update(second, StepOutput([SequenceResult([A, A])]))
    stats = bench.scheduler.stats().spec_decode
    assert stats is not None
    assert stats.by_source["lookup"].num_accepted_tokens == 1


def test_no_more_than_two_batches_are_in_flight() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 6), max_tokens=9)
    bench.scheduler.schedule()
    with pytest.raises(RuntimeError, match="1 are in flight"):
        bench.scheduler.schedule()
    bench.scheduler.schedule(BEFORE)
    with pytest.raises(RuntimeError, match="2 are in flight"):
        bench.scheduler.schedule(BEFORE)


def test_launched_parts_end_in_their_order() -> None:
    def part(count: int, num_drafts: int, samples: bool) -> ScheduledSequence:
        return ScheduledSequence("a", 0, [0] * count, 0, [], 1, samples, num_drafts)

    parts = LaunchedParts()
    assert not parts
    parts.add(part(7, 0, False))
    parts.add(part(4, 3, True))
    assert (parts.num_tokens, parts.num_sampled, parts.is_sampling) == (11, 4, True)
    parts.end_oldest()
    assert (parts.num_tokens, parts.num_sampled, parts.is_sampling) == (4, 4, True)
    parts.end_oldest()
    assert (parts.num_tokens, parts.num_sampled, parts.is_sampling) == (0, 0, False)
    assert not parts


def test_what_is_published_and_not_computed_is_noticed() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 8), max_tokens=5)
    bench.step()
    bench.scheduler.check_integrity()
    (seq,) = bench.scheduler._live.values()
    assert (seq.num_published * bench.pool.block_size, seq.num_computed) == (8, 8)
    seq.num_published += 1
    with pytest.raises(AssertionError, match="has published 3 blocks of 4 tokens and computed 8"):
        bench.scheduler.check_integrity()


@pytest.mark.parametrize("depends", [False, True])
def test_a_block_is_found_by_the_token_behind_it_where_drafts_depend_on_that(depends: bool) -> None:
    bench = Bench(lookahead=Lookahead(1, kv_depends_on_successor=depends))
    bench.add("a", tokens(100, 6), max_tokens=5)
    bench.step()
    bench.scheduler.check_integrity()
    (seq,) = bench.scheduler._live.values()
    assert seq.num_published == 1
    seq.token_ids[4] += 1
    if depends:
        with pytest.raises(AssertionError, match="block 0 is found by a hash that its tokens do"):
            bench.scheduler.check_integrity()
    else:
        bench.scheduler.check_integrity()
