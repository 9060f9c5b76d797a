"""Scheduler: what comes of each step: stops, logprobs, aborts, statistics, misuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from scheduler_harness import EOS, A, B, Bench, rows, rows_of, tokens

from atom.batch import ScheduledBatch, SequenceResult, StepOutput
from atom.messages import FinishReason, TokenLogprobs

# --- abort ---------------------------------------------------------------------------------


def test_abort_frees_blocks_at_once() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", tokens(100, 8), max_tokens=5)
    bench.add("b", tokens(200, 8), max_tokens=5)
    row = bench.step()[0].sequences[0].row
    outputs = bench.scheduler.abort(["b", "a", "nobody", "a"])
    assert [(o.id, o.token_ids, o.finish_reason) for o in outputs] == [
        ("b", [], FinishReason.ABORT),
        ("a", [], FinishReason.ABORT),
    ]
    assert outputs[0].first_scheduled_time is None
    assert outputs[1].first_scheduled_time is not None
    assert bench.pool.num_used == 0
    assert not bench.scheduler.has_unfinished
    # The runner never heard of `b`.
    assert bench.scheduler.schedule().freed_rows == [row]


def test_results_of_an_aborted_sequence_are_ignored() -> None:
    bench = Bench()
    bench.add("a", [1, 2], max_tokens=5)
    bench.add("b", [3, 4], max_tokens=5)
    batch = bench.scheduler.schedule()
    row = rows_of(batch)["a"]
    bench.scheduler.abort(["a"])
    bench.add("a", [5, 6, 7], max_tokens=5)  # another sequence with the same id
    outputs = bench.finish(batch)
    assert list(outputs) == ["b"]
    batch, outputs = bench.step()
    assert batch.freed_rows == [row]
    assert [(n.id, n.prompt_token_ids) for n in batch.new] == [("a", [5, 6, 7])]
    assert rows(batch) == {"b": (2, 1), "a": (0, 3)} or rows(batch)["a"] == (0, 3)
    assert outputs["a"].token_ids == [A]


# --- stopping ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "says", "expected", "reason", "stop_reason"),
    [
        ({}, [A, EOS, B], [A, EOS], FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 3}, [A, EOS, B], [A, EOS, B], "length", None),
        ({"stop_token_ids": [B]}, [A, B, A], [A, B], FinishReason.STOP, B),
        ({"stop_token_ids": [EOS]}, [EOS], [EOS], FinishReason.STOP, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], [EOS], FinishReason.STOP, EOS),
        ({"min_tokens": 2}, [EOS, EOS, EOS, A], [EOS, EOS, EOS], FinishReason.STOP, None),
        ({"min_tokens": 1, "stop_token_ids": [B]}, [B, B, A], [B, B], FinishReason.STOP, B),
        ({"max_tokens": 2}, [A, A, A], [A, A], FinishReason.LENGTH, None),
        ({"max_tokens": 2}, [A, EOS, A], [A, EOS], FinishReason.STOP, None),
        ({}, [A] * 99, [A] * 14, FinishReason.LENGTH, None),  # the context of 16
        ({"max_tokens": 0}, [A, A], [], FinishReason.LENGTH, None),  # the prompt alone is wanted
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_stop_rules(
    params: dict[str, Any],
    says: list[int],
    expected: list[int],
    reason: str,
    stop_reason: int | None,
    at_once: bool,
) -> None:
    bench = Bench(max_model_len=16)
    bench.add("a", [1, 2], **{"max_tokens": None, **params})
    outputs = []
    for i in range(len(says)):
        outputs.append(bench.step({"a": says if at_once else [says[i]]})[1]["a"])
        if not bench.scheduler.has_unfinished:
            break
    assert [t for o in outputs for t in o.token_ids] == expected
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop_reason)
    assert all(o.finish_reason is None for o in outputs[:-1])
    assert bench.pool.num_used == 0


# --- logprobs ------------------------------------------------------------------------------


def candidates(position: int) -> TokenLogprobs:
    return TokenLogprobs([position], [-1.0], [1])


def with_logprobs(batch: ScheduledBatch, num_prompt: int, num_new: int = 1) -> StepOutput:
    """What a runner answers for sequences with `num_prompt` tokens and prompt_logprobs."""
    return StepOutput(
        [
            SequenceResult(
                [A] * num_new if s.wants_sample else [],
                [candidates(s.context_len + i) for i in range(num_new)] if s.wants_sample else None,
                [candidates(i + 1) for i in range(s.start, min(s.context_len, num_prompt - 1))],
            )
            for s in batch.sequences
        ]
    )


def test_prompt_logprobs_come_once_with_the_first_output() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add("warm", tokens(100, 10), max_tokens=1)
    bench.run()
    bench.add("a", tokens(100, 10), prompt_logprobs=1, max_tokens=2)
    for chunk in range(3):
        batch = bench.scheduler.schedule()
        assert batch.sequences[0].start == 4 * chunk  # nothing is taken from the cache
        outputs = bench.scheduler.update(batch, with_logprobs(batch, 10))
        assert len(outputs) == (chunk == 2)
    assert outputs[0].prompt_logprobs == [None, *(candidates(i) for i in range(1, 10))]
    assert outputs[0].num_cached_tokens == 0
    assert bench.scheduler.stats().prefix_cache_queries == 10  # of `warm`
    batch = bench.scheduler.schedule()
    (output,) = bench.scheduler.update(batch, with_logprobs(batch, 10))
    assert output.prompt_logprobs is None
    assert output.finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_of_one_token() -> None:
    bench = Bench()
    bench.add("a", [1], prompt_logprobs=0, max_tokens=1)
    assert bench.step()[1]["a"].prompt_logprobs == [None]


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_survive_preemption(caching: bool) -> None:
    bench = Bench(num_blocks=5, max_num_batched_tokens=6, enable_prefix_caching=caching)
    bench.add("a", tokens(100, 3), max_tokens=14)
    bench.add("b", tokens(200, 5), prompt_logprobs=1, max_tokens=12)
    delivered = []
    starts = []
    while bench.scheduler.has_unfinished:
        batch = bench.scheduler.schedule()
        starts += [s.start for s in batch.sequences if s.id == "b" and batch.new]
        outputs = bench.scheduler.update(batch, with_logprobs(batch, 5))
        delivered += [o.prompt_logprobs for o in outputs if o.id == "b"]
    assert bench.scheduler.stats().num_preemptions > 0
    assert delivered[0] == [None, *(candidates(i) for i in range(1, 5))]
    assert delivered[1:] == [None] * 11
    # Once delivered, the prompt need not be computed for its rows again.
    assert starts[0] == 0
    assert (starts[-1] > 0) == caching


def test_prompt_logprobs_start_over_when_preempted_half_way() -> None:
    bench = Bench(num_blocks=6, max_num_batched_tokens=2, max_num_seqs=2)
    bench.add("a", tokens(100, 4), max_tokens=12)
    bench.add("b", tokens(200, 12), prompt_logprobs=1, max_tokens=1)
    starts = []
    delivered = []
    while bench.scheduler.has_unfinished:
        batch = bench.scheduler.schedule()
        starts += [s.start for s in batch.sequences if s.id == "b"]
        outputs = bench.scheduler.update(batch, with_logprobs(batch, 12))
        delivered += [o.prompt_logprobs for o in outputs if o.id == "b"]
    assert starts[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert delivered == [[None, *(candidates(i) for i in range(1, 12))]]


def test_missing_prompt_logprobs_are_an_error() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], prompt_logprobs=1, max_tokens=1)
    with pytest.raises(RuntimeError, match="3 prompt tokens got 0 prompt logprobs"):
        bench.step()


def test_logprobs_are_cut_with_their_tokens() -> None:
    bench = Bench()
    bench.add("a", [1, 2], logprobs=1, max_tokens=2)
    batch = bench.scheduler.schedule()
    (output,) = bench.scheduler.update(batch, with_logprobs(batch, 2, num_new=3))
    assert output.logprobs == [candidates(2), candidates(3)]


# --- what crosses the boundary -------------------------------------------------------------


def test_stats() -> None:
    bench = Bench(max_num_batched_tokens=6, max_num_seqs=6)
    bench.add("a", tokens(100, 9), max_tokens=2)
    bench.add("b", tokens(200, 2), max_tokens=2)
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks) == (1, 1, 16)
    assert (stats.num_used_blocks, stats.kv_cache_usage) == (3, 3 / 16)
    # A prompt counts when its first output comes.
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (0, 0)
    bench.run({"a": [A], "b": [A, A, A]})
    stats = bench.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (11, 4)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_first_scheduled_time() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=2)
    before = time.monotonic()
    first = bench.step()[1]["a"].first_scheduled_time
    assert first is not None
    assert before <= first <= time.monotonic()
    assert bench.step()[1]["a"].first_scheduled_time == first


def test_a_batch_stays_as_it_was_scheduled() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 4), max_tokens=9)
    batch, _ = bench.step()
    block_ids = list(batch.sequences[0].new_block_ids)
    bench.step()
    bench.scheduler.abort(["a"])
    assert batch.sequences[0].new_block_ids == block_ids
    assert batch.new[0].output_token_ids == []


def test_a_failed_step_is_tried_again_one_sequence_at_a_time() -> None:
    bench = Bench(max_num_batched_tokens=6)
    bench.add("gone", [9], max_tokens=5)
    gone = rows_of(bench.step()[0])
    bench.scheduler.abort(["gone"])
    bench.add("a", tokens(100, 3), max_tokens=3)
    bench.add("b", tokens(200, 8), max_tokens=3)
    batch = bench.scheduler.schedule()
    assert rows(batch) == {"a": (0, 3), "b": (0, 3)}
    failed = rows_of(batch)
    bench.scheduler.give_back(batch, "it broke")
    assert bench.pool.num_used == 0
    bench.add("first", tokens(300, 1), priority=-1, max_tokens=2)
    # The runner is told again what the failed step may have missed, and to forget its sequences.
    batch, outputs = bench.step()
    assert sorted(batch.freed_rows) == sorted([*gone.values(), *failed.values()])
    assert rows(batch) == {"a": (0, 3)}
    assert [n.id for n in batch.new] == ["a"]
    assert outputs["a"].num_preemptions == 1
    # Alone until it has a token, however many steps that takes.
    assert rows(bench.step()[0]) == {"b": (0, 6)}
    batch = bench.scheduler.schedule()
    assert rows(batch) == {"b": (6, 2)}
    bench.scheduler.give_back(batch, "it broke again")
    [refused] = bench.scheduler.take_refused()
    assert (refused.id, refused.message, refused.is_fault) == ("b", "it broke again", True)
    assert rows(bench.step()[0]) == {"first": (0, 1), "a": (0, 4)}
    assert bench.run()["a"][-1].finish_reason is FinishReason.LENGTH


def test_an_interrupted_step_makes_nobody_a_suspect() -> None:
    bench = Bench()
    bench.add("a", [1, 2], max_tokens=3)
    bench.add("b", [3, 4], max_tokens=3)
    for _ in range(3):
        batch = bench.scheduler.schedule()
        assert rows(batch) == {"a": (0, 2), "b": (0, 2)}
        bench.scheduler.give_back(batch, None)
    assert bench.scheduler.take_refused() == []
    assert bench.run().keys() == {"a", "b"}


def test_only_the_batch_that_runs_can_be_given_back() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=9)
    old, _ = bench.step()
    bench.scheduler.schedule()
    with pytest.raises(RuntimeError, match="another batch"):
        bench.scheduler.give_back(old, "it broke")


@pytest.mark.parametrize(
    ("says", "max_tokens", "is_refused"), [([], 9, True), ([A], 9, True), ([A], 1, False)]
)
def test_a_failure_refuses_unless_the_tokens_before_it_are_the_last(
    says: list[int], max_tokens: int, is_refused: bool
) -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=max_tokens)
    batch = bench.scheduler.schedule()
    results = StepOutput([SequenceResult(says, failure="no token is left")])
    outputs = bench.scheduler.update(batch, results)
    assert [o.finish_reason for o in outputs] == ([] if is_refused else [FinishReason.LENGTH])
    refused = bench.scheduler.take_refused()
    assert [(r.message, r.is_fault) for r in refused] == [("no token is left", False)] * is_refused
    assert bench.pool.num_used == 0


def test_steps_must_alternate() -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=9)
    batch = bench.scheduler.schedule()
    with pytest.raises(RuntimeError, match=r"schedule\(\) was called again before update\(\)"):
        bench.scheduler.schedule()
    bench.finish(batch)
    with pytest.raises(RuntimeError, match="0 are in flight"):
        bench.finish(batch)


@pytest.mark.parametrize(
    "answer",
    [
        lambda: StepOutput([]),
        lambda: StepOutput([SequenceResult([])]),
        lambda: StepOutput([SequenceResult([A]), SequenceResult([A])]),
    ],
)
def test_results_that_do_not_fit_are_errors(answer: Callable[[], StepOutput]) -> None:
    bench = Bench()
    bench.add("a", [1], max_tokens=9)
    batch = bench.scheduler.schedule()
    with pytest.raises(RuntimeError, match=r"results for a batch|wants_sample=True"):
        bench.scheduler.update(batch, answer())
