"""Scheduler: drafts are computed behind the known tokens, and count once they are confirmed."""

from __future__ import annotations

import pytest
from scheduler_harness import EOS, A, B, Bench, rows, tokens

from atom.batch import Lookahead
from atom.messages import FinishReason

THREE = Lookahead(3)
C = 12


def test_confirmed_drafts_are_computed_already() -> None:
    bench = Bench(lookahead=THREE)
    bench.add("a", tokens(100, 5), max_tokens=20)
    batch, _ = bench.step(drafts=[A, B, C])
    assert batch.sequences[0].num_drafts == 0  # nothing was proposed before the first step
    batch, outputs = bench.step({"a": [A, B, A]}, drafts=[C])
    (row,) = batch.sequences
    assert (row.token_ids, row.num_drafts, row.start) == ([A, A, B, C], 3, 5)
    assert row.wants_sample
    assert row.successor_token is None
    assert outputs["a"].token_ids == [A, B, A]
    # The newest token and one draft; the rejected C is computed over.
    batch, outputs = bench.step({"a": [B]})
    assert rows(batch) == {"a": (8, 2)}
    assert batch.sequences[0].token_ids == [A, C]
    assert rows(bench.step()[0]) == {"a": (9, 1)}
    spec = bench.scheduler.stats().spec_decode
    assert spec is not None
    assert (spec.num_drafts, spec.num_draft_tokens, spec.accepted_counts) == (2, 4, [1, 0, 1, 0])


def test_drafts_stay_within_max_tokens_and_the_context() -> None:
    bench = Bench(max_model_len=12, lookahead=THREE)
    bench.add("short", tokens(100, 4), max_tokens=4)
    bench.add("long", tokens(200, 7), max_tokens=None)
    bench.step(drafts=[A, A, A])
    batch, outputs = bench.step({"short": [A, A, A], "long": [A] * 4})
    assert [s.num_drafts for s in batch.sequences] == [2, 3]
    assert outputs["short"].finish_reason is FinishReason.LENGTH
    assert outputs["long"].finish_reason is FinishReason.LENGTH


def test_slots_beyond_the_drafts_are_reserved() -> None:
    """Up to the last token that is computed, and no further."""
    bench = Bench(lookahead=Lookahead(1, num_slots=9))
    bench.add("a", tokens(100, 5), max_tokens=40)
    bench.add("b", tokens(200, 5), max_tokens=5)
    batch, _ = bench.step()
    size = bench.scheduler._pool.block_size
    assert [s.num_blocks for s in batch.sequences] == [-(-14 // size), -(-9 // size)]


def test_drafts_share_the_budget() -> None:
    bench = Bench(lookahead=THREE, max_num_batched_tokens=5, max_num_seqs=3)
    for id in "abc":
        bench.add(id, [ord(id)], max_tokens=20)
    bench.step(drafts=[A, A, A])
    batch, _ = bench.step()
    # One token each at least; what is left goes to the first.
    assert [len(s.token_ids) for s in batch.sequences] == [3, 1, 1]
    assert [s.num_drafts for s in batch.sequences] == [2, 0, 0]


def test_nothing_counts_after_a_stop_among_the_drafts() -> None:
    bench = Bench(lookahead=THREE)
    bench.add("a", [1, 2], max_tokens=20)
    bench.step(drafts=[A, EOS, A])
    _, outputs = bench.step({"a": [A, EOS, A, A]})
    assert outputs["a"].token_ids == [A, EOS]
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert bench.scheduler.stats().num_generation_tokens == 3


def test_rejected_drafts_are_not_published() -> None:
    bench = Bench(lookahead=THREE)
    bench.add("a", tokens(100, 5), max_tokens=20)
    bench.step(drafts=[B, B, B])
    bench.step({"a": [C]})  # the drafts would have filled the second block
    bench.add("b", [*tokens(100, 5), A, B, B, B, A], max_tokens=1)
    assert rows(bench.step()[0])["b"] == (4, 6)


def test_confirmed_drafts_are_published() -> None:
    bench = Bench(lookahead=THREE)
    bench.add("a", tokens(100, 5), max_tokens=20)
    bench.step(drafts=[B, B, B])
    bench.step({"a": [B, B, C]})
    bench.add("b", [*tokens(100, 5), A, B, B, A], max_tokens=1)
    assert rows(bench.step()[0])["b"] == (8, 1)


def test_blocks_cover_the_slots_that_the_proposer_writes() -> None:
    bench = Bench(lookahead=THREE)
    bench.add("a", tokens(100, 4), max_tokens=20)
    batch, _ = bench.step(drafts=[A, A, A])
    assert len(batch.sequences[0].new_block_ids) == batch.sequences[0].num_blocks == 2
    batch, _ = bench.step()  # tokens 5 to 8, and three slots more
    assert batch.sequences[0].num_blocks == 3
    assert len(batch.sequences[0].new_block_ids) == 1


@pytest.mark.parametrize("num_drafts", [1, 3, 15])
def test_a_request_that_fits_alone_finishes(num_drafts: int) -> None:
    bench = Bench(num_blocks=4, lookahead=Lookahead(num_drafts))
    bench.add("a", [1], max_tokens=16)
    bench.add("b", [2], max_tokens=16)
    for _ in range(50):
        bench.step(drafts=[B] * num_drafts)
    assert not bench.scheduler.has_unfinished
    assert bench.pool.num_used == 0


def test_preemption_drops_drafts() -> None:
    bench = Bench(num_blocks=4, lookahead=Lookahead(1), enable_prefix_caching=False)
    bench.add("a", tokens(100, 3), max_tokens=10)
    bench.add("b", tokens(200, 3), max_tokens=10)
    resumed = []
    while bench.scheduler.has_unfinished:
        batch, _ = bench.step(drafts=[B])
        resumed += [s for s in batch.sequences if any(n.id == s.id for n in batch.new)]
    assert bench.scheduler.stats().num_preemptions > 0
    assert all(s.num_drafts == 0 for s in resumed)


def test_a_kv_that_depends_on_the_next_token_is_shared_only_before_that_token() -> None:
    bench = Bench(lookahead=Lookahead(1, kv_depends_on_successor=True))
    bench.add("a", [*tokens(100, 8), A], max_tokens=1)
    bench.run()
    bench.add("same", [*tokens(100, 8), A], max_tokens=1)
    bench.add("other", [*tokens(100, 8), B, B, B, B, B], max_tokens=1)
    assert rows(bench.step()[0]) == {"same": (8, 1), "other": (4, 9)}
    # The second block exists twice now, once for each next token; both are found.
    bench.add("again", [*tokens(100, 8), B, B, B, B, B], max_tokens=1)
    bench.add("same", [*tokens(100, 8), A], max_tokens=1)
    assert rows(bench.step()[0]) == {"again": (12, 1), "same": (8, 1)}


def test_without_speculation_there_are_no_statistics() -> None:
    bench = Bench()
    assert bench.scheduler.stats().spec_decode is None
