"""Blocks of layers with a sliding window: held as far as the window reaches, found by prefixes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduler_harness import A, B, Bench, rows, tokens

from atom.batch import LaunchedStep, Lookahead, SequenceResult, StepOutput
from atom.kv_cache import cache_window
from atom.kv_cache.base import KVCachePlan, WindowNeed, plan_kv_cache
from atom.kv_cache.cache_window import CacheWindow
from atom.messages import WindowLimits
from atom.model_engine.scheduling.window_pool import WindowPool
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES

WINDOW = WindowLimits(num_tokens=5, tile=1, num_blocks=12)


def held(bench: Bench) -> int:
    return bench.scheduler.stats().num_used_window_blocks


def test_blocks_behind_the_window_are_free_while_a_sequence_runs() -> None:
    bench = Bench(window=WINDOW, max_num_batched_tokens=8)
    bench.add("a", tokens(100, 30), max_tokens=20, ignore_eos=True)
    most = 0
    while bench.scheduler.has_unfinished:
        batch = bench.scheduler.schedule()
        most = max(most, held(bench))
        bench.finish(batch)
    # Those of a chunk of 8 tokens, and of the 4 keys before it; all 50 tokens have 13.
    assert most == 3
    assert held(bench) == 0


def test_a_rejected_draft_needs_nothing_that_is_gone() -> None:
    bench = Bench(lookahead=Lookahead(3), window=WINDOW)
    bench.add("a", tokens(100, 7), max_tokens=20, ignore_eos=True)
    batch, _ = bench.step(drafts=[A, A, A])
    windows = bench.scheduler._windows
    assert windows is not None
    verified = bench.scheduler.schedule()
    assert rows(verified) == {"a": (7, 4)}
    # Query 7 sees key 3, in the first block; with all drafts accepted, 11 would not.
    assert windows.ref_count(batch.sequences[0].new_block_ids[0]) == 1
    bench.finish(verified, {"a": [B]}, drafts=[A, A, A])
    # Now 8 sees key 4 at most.
    assert windows.ref_count(batch.sequences[0].new_block_ids[0]) == 0
    assert rows(bench.scheduler.schedule()) == {"a": (8, 4)}


def test_nor_do_steps_in_flight() -> None:
    """The step behind one whose drafts are all rejected begins where that did."""
    bench = Bench(lookahead=Lookahead(3), window=WINDOW)
    bench.add("a", tokens(100, 5), max_tokens=20, ignore_eos=True)
    first = bench.scheduler.schedule()
    before = LaunchedStep(lambda: StepOutput([]), 3, "draft")
    second = bench.scheduler.schedule(before)
    assert rows(second) == {"a": (5, 4)}
    bench.finish(first)
    windows = bench.scheduler._windows
    assert windows is not None
    # It has computed 5 tokens, and 9 are under way, of which 6 may be left: 5 sees key 1.
    assert windows.ref_count(first.sequences[0].new_block_ids[0]) == 1
    bench.scheduler.schedule(before)
    bench.scheduler.update(second, StepOutput([SequenceResult([B])]))
    bench.scheduler.check_integrity()
    # Query 6 sees key 2, though 6 + 4 tokens are under way.
    assert windows.ref_count(first.sequences[0].new_block_ids[0]) == 1


def test_kernels_read_whole_tiles() -> None:
    window = CacheWindow(num_tokens=5, tile=8, block_size=4)
    assert [window.first_block(p) for p in (0, 11, 12, 19, 20)] == [0, 0, 2, 2, 4]
    assert CacheWindow(5, 1, 4).first_block(12) == 2


def test_a_prefix_is_found_where_its_window_is_there() -> None:
    bench = Bench(window=WINDOW, num_blocks=40)
    prompt = tokens(100, 21)
    bench.add("a", prompt, max_tokens=1)
    bench.run()
    bench.add("b", prompt, max_tokens=1)
    batch, outputs = bench.step()
    # Queries from 20 on see keys from 16 on: one block of five.
    assert rows(batch) == {"b": (20, 1)}
    assert outputs["b"].num_cached_tokens == 20
    # The others' parts are given to someone else.
    bench.add("c", tokens(200, 48), max_tokens=1)
    bench.run()
    bench.add("d", prompt, max_tokens=1)
    batch, outputs = bench.step()
    assert rows(batch) == {"d": (0, 21)}
    assert outputs["d"].num_cached_tokens == 0
    # Of two equal blocks the one that has its part is found from now on.
    bench.add("e", prompt, max_tokens=1)
    assert rows(bench.step()[0]) == {"e": (20, 1)}


def test_a_shorter_prefix_is_found_where_only_that_has_its_window() -> None:
    bench = Bench(window=WindowLimits(5, 1, 8), num_blocks=40, max_num_batched_tokens=8)
    bench.add("a", tokens(100, 25), max_tokens=1)
    bench.run()
    windows, pool = bench.scheduler._windows, bench.pool
    assert windows is not None
    # All six blocks are cached, and all have parts. Others take those that nobody used for longest.
    taken = pool.allocate(6)
    assert taken is not None
    windows.attach(taken)
    bench.add("b", tokens(100, 25), max_tokens=1)
    batch = bench.scheduler.schedule()
    windows.release(taken)
    pool.free(taken)
    found = rows(batch)["b"][0]
    assert 0 < found <= 24
    bench.finish(batch)
    bench.run()


@pytest.mark.parametrize("caching", [True, False])
def test_who_lacks_parts_waits_or_is_preempted(caching: bool) -> None:
    limits = WindowLimits(5, 1, 5)
    bench = Bench(40, 64, caching, window=limits, max_num_batched_tokens=8)
    for id in ("a", "b", "c"):
        bench.add(id, tokens(ord(id), 14), max_tokens=12, ignore_eos=True)
    outputs = bench.run()
    assert [len(outputs[id]) for id in ("a", "b", "c")] == [12, 12, 12]
    assert bench.scheduler.stats().num_preemptions > 0
    assert held(bench) == 0


def test_a_suspect_that_finds_no_parts_waits_while_those_that_passed_run_on() -> None:
    bench = Bench(
        40, window=WindowLimits(5, 1, 6), max_num_batched_tokens=16, long_prefill_token_threshold=4
    )
    for id, count in (("x", 13), ("y", 20), ("z", 4)):
        bench.add(id, tokens(ord(id), count), max_tokens=6, ignore_eos=True)
    failed = bench.scheduler.schedule()
    assert rows(failed) == {"x": (0, 4), "y": (0, 4), "z": (0, 4)}
    bench.scheduler.give_back(failed, "the step failed")
    # Of the first half, the one that is computed holds two parts of six, the other one; the rest
    # of its prompt, of which nothing is cut here, needs four.
    assert rows(bench.step()[0]) == {"x": (0, 13), "y": (0, 3)}
    assert held(bench) == 3
    batch = bench.scheduler.schedule()
    assert rows(batch) == {"x": (13, 1), "y": (3, 4)}
    bench.finish(batch)
    assert {id: len(outputs) for id, outputs in bench.run().items()} == {"x": 4, "y": 6, "z": 6}


def test_memory_of_gemma_3_27b() -> None:
    """10 layers without and 52 with a window of 1,024 tokens, 32k contexts, 64 blocks a GB."""
    layer = 16 * 2 * 16 * 128 * 2
    window = CacheWindow(1024, 128, 16)
    need = WindowNeed(52 * layer, window.per_sequence, 2 * 8192 // 16, 64)
    budget, most = 60 * 2**30, 64 * 32768
    together = plan_kv_cache(budget, [62 * layer], 16, most)
    apart = plan_kv_cache(budget, [10 * layer], 16, most, window=need)
    used = apart.num_blocks * 10 * layer + apart.num_window_blocks * 52 * layer
    assert budget - 62 * layer < used <= budget
    in_context = 32768 // 16
    before = together.num_blocks // in_context
    of_windows = (apart.num_window_blocks - need.in_steps) // need.per_sequence
    assert (before, min(apart.num_blocks // in_context, of_windows)) == (3, 13)


def test_a_small_memory_has_room_for_whole_contexts_in_both_pools() -> None:
    need = WindowNeed(300, per_sequence=5, in_steps=8, max_num_seqs=4)
    for budget in range(400, 60_000, 97):
        plan = plan_kv_cache(budget, [100], 16, 4 * 640, window=need)
        assert plan.num_blocks * 100 + plan.num_window_blocks * 300 <= budget
        assert plan.num_blocks >= budget // 400 or plan.num_blocks == 160
        assert plan.num_window_blocks >= min(need.least, plan.num_blocks)
    assert plan_kv_cache(10**6, [100], 16, 2560, window=need) == KVCachePlan(160, 400, need.most)


def test_a_model_of_windows_alone_has_room_for_every_context() -> None:
    need = WindowNeed(300, per_sequence=5, in_steps=8, max_num_seqs=4)
    assert plan_kv_cache(6000, [0], 16, 2560, window=need) == KVCachePlan(160, 300, 20)
    # As long as a sequence fits.
    assert plan_kv_cache(3000, [0], 16, 2560, window=need) == KVCachePlan(10, 300, 10)


def test_a_window_counts_with_the_longest_query() -> None:
    assert cache_window._MAX_DECODE_QUERIES == MAX_DECODE_QUERIES


def test_prompt_logprobs_take_no_cached_prefix() -> None:
    prompt = tokens(100, 9)
    for logprobs, first in ((None, 0), (0, 0), (None, 8)):
        bench = Bench(window=WINDOW)
        bench.add("before", prompt, max_tokens=1)
        if first or logprobs is not None:
            bench.step()
        else:
            bench.scheduler.abort(["before"])
        bench.add("a", prompt, max_tokens=1, prompt_logprobs=logprobs)
        assert rows(bench.scheduler.schedule()) == {"a": (first, 9 - first)}


def _free_a_part(windows: WindowPool) -> None:
    windows._free[0] = None


def _count_a_part_twice(windows: WindowPool) -> None:
    windows._ref_counts[0] += 1


def _forget_whose_a_part_is(windows: WindowPool) -> None:
    windows._block_of[0] = -1


def _name_a_part_twice(windows: WindowPool) -> None:
    windows._block_of[5] = windows._block_of[0]


def _take_a_part(windows: WindowPool) -> None:
    windows._part_of[windows._block_of[0]] = windows._block_of[0] = -1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_free_a_part, r"parts \{0\} are either free and held, or neither"),
        (_count_a_part_twice, r"held \[1, 1, 0, .*\], counted \[2, 1, 0,"),
        (_forget_whose_a_part_is, r"blocks name parts \{\(0, 0\)\}, parts set\(\)"),
        (_name_a_part_twice, r"blocks name parts set\(\), parts \{\(0, 5\)\}"),
        (_take_a_part, "block 0 is held, and has no part"),
    ],
)
def test_integrity_check_tells_what_is_wrong(
    damage: Callable[[WindowPool], None], message: str
) -> None:
    bench = Bench(window=WINDOW)
    bench.add("a", tokens(100, 5), max_tokens=20, ignore_eos=True)
    bench.step()
    assert bench.scheduler._windows is not None
    damage(bench.scheduler._windows)
    with pytest.raises(AssertionError, match=message):
        bench.scheduler.check_integrity()


def test_integrity_check_looks_at_the_pool_and_at_who_holds_its_blocks() -> None:
    bench = Bench()
    bench.add("a", tokens(100, 5), max_tokens=20, ignore_eos=True)
    bench.step()
    bench.pool.hold([0])
    with pytest.raises(AssertionError, match=r"block: .* = \{0: \(1, 2\)\}"):
        bench.scheduler.check_integrity()
    bench.pool.free([0])
    bench.scheduler.check_integrity()
    bench.pool._free[0] = None
    with pytest.raises(AssertionError, match=r"blocks \[0\] are either free and held, or neither"):
        bench.scheduler.check_integrity()
