"""Scheduler: what each step computes, on a pool small enough to count by hand."""

from __future__ import annotations

import pytest
from scheduler_harness import A, B, Bench, ids, rows, rows_of, tokens

from atom.batch import ScheduledBatch
from atom.config import ConfigError, SchedulerOptions
from atom.messages import (
    EngineLimits,
    FinishReason,
    RequestRefusedError,
)
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduler import Scheduler

# --- the catch-up rule ---------------------------------------------------------------------


def test_prefill_then_decode() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 5), max_tokens=3)
    batch, outputs = bench.step()
    (row,) = batch.sequences
    assert (row.token_ids, row.start, row.num_blocks) == (tokens(100, 5), 0, 2)
    assert len(row.new_block_ids) == 2
    assert (row.wants_sample, row.successor_token, row.num_drafts) == (True, None, 0)
    (new,) = batch.new
    assert (new.id, new.prompt_token_ids, new.output_token_ids) == ("a", tokens(100, 5), [])
    assert outputs["a"].token_ids == [A]
    batch, _ = bench.step({"a": [B]})
    (row,) = batch.sequences
    assert (row.token_ids, row.start, row.wants_sample, batch.new) == ([A], 5, True, [])
    batch, outputs = bench.step()
    assert rows(batch) == {"a": (6, 1)}
    assert batch.sequences[0].token_ids == [B]
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    assert not bench.scheduler.has_unfinished
    assert bench.scheduler.schedule() == ScheduledBatch([], [], [row.row])
    assert bench.scheduler.schedule() == ScheduledBatch([], [], [])


def test_long_prompts_are_computed_in_chunks_beside_decodes() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", tokens(100, 3), max_tokens=9)
    bench.add("b", tokens(200, 12), max_tokens=2)
    batch, outputs = bench.step()
    assert rows(batch) == {"a": (0, 3), "b": (0, 5)}
    chunk = batch.sequences[1]
    assert (chunk.wants_sample, chunk.successor_token) == (False, 205)
    assert chunk.num_blocks == 3  # it has the blocks of its whole prompt
    assert "b" not in outputs
    batch, outputs = bench.step()
    assert rows(batch) == {"a": (3, 1), "b": (5, 7)}
    assert batch.sequences[1].wants_sample
    assert outputs["b"].token_ids == [A]


def test_a_prefill_in_front_does_not_stall_decodes_behind() -> None:
    bench = Bench(max_num_batched_tokens=4, max_num_seqs=3)
    bench.add("behind", tokens(200, 2), max_tokens=20, priority=1)
    bench.step()
    bench.add("front", tokens(100, 9), max_tokens=1)
    assert rows(bench.step()[0]) == {"behind": (2, 1), "front": (0, 3)}
    batch, _ = bench.step()
    assert rows(batch) == {"front": (3, 3), "behind": (3, 1)}


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    bench = Bench(max_num_batched_tokens=8, long_prefill_token_threshold=5)
    bench.add("long", tokens(100, 14), max_tokens=2)
    bench.add("short", tokens(200, 3), max_tokens=2)
    batch, outputs = bench.step()
    assert rows(batch) == {"long": (0, 5), "short": (0, 3)}
    assert "short" in outputs
    assert rows(bench.step()[0]) == {"long": (5, 5), "short": (3, 1)}
    batch, outputs = bench.step()
    assert rows(batch) == {"long": (10, 4)}
    assert outputs["long"].token_ids == [A]


def test_a_resumed_sequence_is_cut_like_a_long_prompt() -> None:
    bench = Bench(num_blocks=4, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    bench.add("first", tokens(100, 3), max_tokens=12)
    bench.add("second", tokens(200, 3), max_tokens=12)
    chunks = []
    while bench.scheduler.has_unfinished:
        batch, _ = bench.step()
        chunks += [len(s.token_ids) for s in batch.sequences]
    assert max(chunks) == 4
    assert bench.scheduler.stats().num_preemptions == 1


def test_prompts_are_cut_only_where_they_may_be() -> None:
    with pytest.raises(ConfigError, match="chunked prefill is off"):
        SchedulerOptions(enable_chunked_prefill=False, long_prefill_token_threshold=4)


def test_sequences_per_step_are_limited() -> None:
    bench = Bench(max_num_seqs=2)
    for id in "abc":
        bench.add(id, [ord(id)] * 2, max_tokens=2)
    assert ids(bench.step()[0]) == ["a", "b"]
    assert ids(bench.step()[0]) == ["a", "b"]
    batch, _ = bench.step()
    assert (ids(batch), batch.freed_rows) == (["c"], [0, 1])
    # One of those that became free.
    assert rows_of(batch)["c"] in (0, 1)


def test_several_tokens_in_one_step_are_caught_up_with() -> None:
    bench = Bench()
    bench.add("a", [1, 2], max_tokens=6)
    _, outputs = bench.step({"a": [A, B, A]})
    assert outputs["a"].token_ids == [A, B, A]
    batch, outputs = bench.step({"a": [B] * 9})
    assert (batch.sequences[0].token_ids, batch.sequences[0].start) == ([A, B, A], 2)
    assert outputs["a"].token_ids == [B] * 3
    assert outputs["a"].finish_reason is FinishReason.LENGTH


# --- admission -----------------------------------------------------------------------------


def test_waiting_sequences_are_admitted_by_priority_then_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    for id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)):
        bench.add(id, [ord(id)], priority=priority, max_tokens=1)
    assert list(bench.run()) == ["e", "b", "d", "a", "c"]


def test_nobody_overtakes_the_first_waiting_sequence() -> None:
    bench = Bench(num_blocks=6)
    bench.add("a", tokens(100, 14), max_tokens=3)
    bench.add("b", tokens(200, 14), max_tokens=1)  # would need all blocks that are left
    bench.add("c", [1], max_tokens=1)
    for _ in range(3):
        assert ids(bench.step()[0]) == ["a"]
    assert ids(bench.step()[0]) == ["b", "c"]


def test_admission_leaves_each_running_sequence_a_block_to_grow() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", tokens(100, 4), max_tokens=5)
    bench.add("b", tokens(200, 9), max_tokens=1)
    assert ids(bench.step()[0]) == ["a"]
    bench = Bench(num_blocks=5)
    bench.add("a", tokens(100, 4), max_tokens=5)
    bench.add("b", tokens(200, 9), max_tokens=1)
    assert ids(bench.step()[0]) == ["a", "b"]


def test_without_chunked_prefill_a_prompt_is_scheduled_whole() -> None:
    bench = Bench(max_num_batched_tokens=8, enable_chunked_prefill=False)
    bench.add("a", tokens(100, 4), max_tokens=3)
    bench.add("b", tokens(200, 6), max_tokens=1)
    bench.add("c", tokens(300, 8), max_tokens=1)
    assert rows(bench.step()[0]) == {"a": (0, 4)}
    assert rows(bench.step()[0]) == {"a": (4, 1), "b": (0, 6)}
    assert rows(bench.step()[0]) == {"a": (5, 1)}
    assert rows(bench.step()[0]) == {"c": (0, 8)}
    with pytest.raises(RequestRefusedError, match=r"9 tokens.*max_num_batched_tokens=8") as error:
        bench.add("d", tokens(100, 9), max_tokens=1)
    assert error.value.param == "prompt"


def test_without_chunked_prefill_outputs_may_be_recomputed_in_chunks() -> None:
    bench = Bench(
        num_blocks=5,
        max_num_batched_tokens=6,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    bench.add("a", tokens(100, 4), max_tokens=9)
    bench.add("b", tokens(200, 5), max_tokens=9)
    starts = []
    while bench.scheduler.has_unfinished:
        starts += [rows(bench.step()[0]).get("b")]
    assert bench.scheduler.stats().num_preemptions == 1
    resumed = starts.index((0, 6))
    assert starts[resumed + 1][0] == 6


def test_refusals() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", [1], max_tokens=1)
    with pytest.raises(ValueError, match="'a' is already in use"):
        bench.add("a", [1], max_tokens=1)
    with pytest.raises(RequestRefusedError, match="prompt holds no tokens"):
        bench.add("b", [], max_tokens=1)
    with pytest.raises(RequestRefusedError, match="16 tokens there are"):
        bench.add("b", [1], max_tokens=17)
    bench.add("b", [1], max_tokens=16)  # the last token needs no slot
    assert len(bench.run()["b"]) == 16
    bench.add("a", [1], max_tokens=1)  # free again


def test_the_pool_must_be_the_one_of_the_limits() -> None:
    limits = EngineLimits(max_model_len=8, num_blocks=3, block_size=4, vocab_size=9, max_logprobs=0)
    with pytest.raises(ValueError, match="3 blocks of 4 tokens, the pool has 2 of 4"):
        Scheduler(SchedulerOptions(), BlockPool(2, 4, True), limits, frozenset())


# --- preemption ----------------------------------------------------------------------------


def test_the_latest_of_the_worst_priority_is_preempted() -> None:
    bench = Bench(num_blocks=9, enable_prefix_caching=False)
    bench.add("worst", tokens(100, 12), priority=1, max_tokens=9)
    bench.add("first", tokens(200, 4), max_tokens=9)
    bench.add("later", tokens(300, 4), max_tokens=9)
    for _ in range(5):
        batch, _ = bench.step()
        assert ids(batch) == ["first", "later", "worst"]
        worst = rows_of(batch)
        bench.scheduler.abort(["urgent"])
        bench.add("urgent", [1], priority=-1, max_tokens=1)
    # The ninth token of `first` takes the last block, that of `later` takes one of `worst`.
    assert bench.pool.num_free == 1
    freed = worst["worst"]
    batch, _ = bench.step()
    assert (ids(batch), batch.freed_rows, batch.new) == (["first", "later"], [freed], [])
    assert bench.scheduler.stats().num_preemptions == 1
    # There would have been room, but nobody is admitted in a step that preempts.
    assert ids(bench.step()[0]) == ["first", "later", "urgent"]


def test_a_sequence_may_preempt_itself() -> None:
    bench = Bench(num_blocks=3, enable_prefix_caching=False)
    bench.add("a", tokens(100, 3), max_tokens=6)
    bench.add("b", tokens(200, 4), max_tokens=6)
    batch, _ = bench.step()
    assert ids(batch) == ["a", "b"]
    batch, _ = bench.step({"b": [B]})
    assert rows(batch) == {"a": (3, 1), "b": (4, 1)}
    row = rows_of(batch)["b"]
    batch, outputs = bench.step()
    assert rows(batch) == {"a": (4, 1)}
    assert batch.freed_rows == [row]
    while "b" not in rows(batch):
        batch, outputs = bench.step()
    # Resumed: prompt and outputs are computed again, and nothing is said twice.
    (new,) = batch.new
    assert (new.prompt_token_ids, new.output_token_ids) == (tokens(200, 4), [A, B])
    assert rows(batch)["b"] == (0, 6)
    assert (outputs["b"].token_ids, outputs["b"].num_preemptions) == ([A], 1)
    assert bench.scheduler.stats().num_preemptions == 1
    bench.run()


def test_a_preempted_sequence_keeps_its_place() -> None:
    bench = Bench(num_blocks=3, enable_prefix_caching=False)
    bench.add("a", tokens(100, 3), max_tokens=6)
    bench.add("b", tokens(200, 4), max_tokens=6)
    bench.add("c", tokens(300, 4), max_tokens=1)
    finished = [id for id, outs in bench.run().items() if outs[-1].finish_reason]
    assert finished == ["a", "b", "c"]


def test_a_resumed_sequence_finds_its_own_blocks() -> None:
    bench = Bench(num_blocks=6)
    bench.add("a", tokens(100, 4), max_tokens=17)
    bench.add("b", tokens(200, 4), max_tokens=17)
    starts: dict[str, list[int]] = {"a": [], "b": []}
    cached = set()
    while bench.scheduler.has_unfinished:
        batch, outputs = bench.step()
        for new in batch.new:
            starts[new.id].append(rows(batch)[new.id][0])
        cached |= {output.num_cached_tokens for output in outputs.values()}
    # `b` had three blocks; `a` grew by two, so its tail is gone.
    assert starts == {"a": [0], "b": [0, 4]}
    # What a sequence finds of its own is not counted as cached.
    assert cached == {0}
    assert bench.scheduler.stats().prefix_cache_hits == 0


# --- prefix caching ------------------------------------------------------------------------


def test_a_prefix_is_found_and_one_token_is_left_to_compute() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 8), max_tokens=1)
    bench.run()
    bench.add("same", tokens(100, 8), max_tokens=1)
    bench.add("longer", tokens(100, 11), max_tokens=1)
    bench.add("other", tokens(101, 8), max_tokens=1)
    batch, outputs = bench.step()
    assert rows(batch) == {"same": (4, 4), "longer": (8, 3), "other": (0, 8)}
    same, longer, _ = batch.sequences
    assert same.new_block_ids[0] == longer.new_block_ids[0]
    assert same.new_block_ids[1] != longer.new_block_ids[1]
    assert [outputs[id].num_cached_tokens for id in rows(batch)] == [4, 8, 0]
    stats = bench.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8 + 8 + 11 + 8, 12)


def test_generated_tokens_are_cached_too() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 3), max_tokens=6)
    bench.run()
    bench.add("b", [*tokens(100, 3), A, A, A, A, A, A, A], max_tokens=1)
    # Of nine tokens eight were computed: the last one of all was only sampled.
    assert rows(bench.step()[0]) == {"b": (8, 2)}


def test_only_computed_blocks_can_be_matched() -> None:
    bench = Bench(max_num_batched_tokens=6)
    bench.add("a", tokens(100, 12), max_tokens=1)
    batch = bench.scheduler.schedule()
    bench.add("b", tokens(100, 12), max_tokens=1, priority=-1)
    bench.finish(batch)
    batch, _ = bench.step()
    assert rows(batch) == {"a": (6, 6)}  # `a` runs first and takes the whole budget
    assert rows(bench.step()[0]) == {"b": (8, 4)}
    bench = Bench(max_num_batched_tokens=7)
    bench.add("a", tokens(100, 12), max_tokens=1)
    bench.step()
    bench.add("b", tokens(100, 12), max_tokens=1)
    assert rows(bench.step()[0]) == {"a": (7, 5), "b": (4, 2)}


def test_an_aborted_step_publishes_nothing() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 8), max_tokens=5)
    batch = bench.scheduler.schedule()
    bench.scheduler.abort(["a"])
    bench.finish(batch)
    bench.add("b", tokens(100, 8), max_tokens=1)
    assert rows(bench.step()[0]) == {"b": (0, 8)}


def test_salts_do_not_share() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 8), salt="x", max_tokens=1)
    bench.run()
    bench.add("b", tokens(100, 8), max_tokens=1)
    bench.add("c", tokens(100, 8), salt="x", max_tokens=1)
    assert rows(bench.step()[0]) == {"b": (0, 8), "c": (4, 4)}


def test_without_prefix_caching_everything_is_computed() -> None:
    bench = Bench(enable_prefix_caching=False)
    for id in "ab":
        bench.add(id, tokens(100, 8), max_tokens=1)
        assert rows(bench.step()[0]) == {id: (0, 8)}
    assert bench.scheduler.stats().prefix_cache_queries == 0


def test_a_sequence_that_cannot_be_admitted_gives_its_matches_back() -> None:
    bench = Bench(num_blocks=4)
    bench.add("a", tokens(100, 4), max_tokens=1)
    bench.run()
    bench.add("b", tokens(200, 9), max_tokens=2)
    bench.step()
    bench.add("c", tokens(100, 5), max_tokens=1)
    assert ids(bench.step()[0]) == ["b"]
    assert bench.scheduler.stats().prefix_cache_queries == 4 + 9  # `c` was not admitted
    assert rows(bench.step()[0]) == {"c": (4, 1)}


def test_steps_are_counted_by_what_they_compute() -> None:
    """A prompt's last token is part of it, even where it is computed alone."""
    bench = Bench(max_num_batched_tokens=8)

    def step() -> tuple[int, int]:
        bench.step()
        stats = bench.scheduler.stats()
        return stats.num_decode_steps, stats.num_mixed_steps

    bench.add("a", tokens(100, 9), max_tokens=20)
    assert [step(), step(), step()] == [(0, 0), (0, 0), (1, 0)]
    bench.add("one token", [7], max_tokens=20)
    assert [step(), step()] == [(1, 1), (2, 1)]
    bench.add("all but one cached", tokens(100, 9), max_tokens=20)
    assert [step(), step()] == [(2, 2), (3, 2)]
    bench.add("in parts", tokens(200, 8), max_tokens=20)
    assert [step(), step(), step()] == [(3, 3), (3, 4), (4, 4)]
    assert bench.scheduler.stats().num_steps == 10
