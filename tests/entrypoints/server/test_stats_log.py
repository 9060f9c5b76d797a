"""The server's log line."""

from __future__ import annotations

from atom.entrypoints.server.stats_log import describe
from atom.messages import EngineStats
from atom.stats import SpecDecodeCounter, SpecDecodeStats


def test_an_interval_in_one_line() -> None:
    before = EngineStats(num_prompt_tokens=100, num_generation_tokens=50, num_blocks=10)
    now = EngineStats(
        num_running=2,
        num_waiting=1,
        num_blocks=10,
        num_used_blocks=5,
        num_prompt_tokens=150,
        num_generation_tokens=250,
        prefix_cache_queries=40,
        prefix_cache_hits=10,
        spec_decode=SpecDecodeStats(
            num_drafts=4, num_draft_tokens=12, accepted_counts=[1, 0, 1, 2]
        ),
    )
    assert describe(before, now, 10.0) == (
        "2 running, 1 waiting; 5 prompt and 20 generated tokens/s; KV cache 50.0%; "
        "prefix hits 25.0%; 3.00 tokens per forward, 66.7% accepted"
    )


def test_the_line_stays_short() -> None:
    drafts = SpecDecodeStats(
        num_drafts=10**6,
        num_draft_tokens=15 * 10**6,
        accepted_counts=[0] * 15 + [10**6],
        by_source={"eagle3": SpecDecodeStats(), "lookup": SpecDecodeStats()},
    )
    now = EngineStats(
        num_running=9999,
        num_waiting=99999,
        num_blocks=10,
        num_used_blocks=10,
        num_prompt_tokens=12345670,
        num_generation_tokens=999990,
        prefix_cache_queries=40,
        prefix_cache_hits=40,
        spec_decode=drafts,
    )
    before = EngineStats(num_blocks=10)
    assert len(describe(before, now, 10.0)) <= 160


def test_only_verified_drafts_count() -> None:
    counter = SpecDecodeCounter(3)
    counter.count(0, 0)
    counter.count(3, 2)
    counter.count(1, 1)
    stats = counter.snapshot()
    assert stats is not None
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 4, 3)
    assert stats.accepted_counts == [0, 1, 1, 0]
    assert stats.accepted_per_position == [2, 1, 0]
    assert stats.acceptance_rate == 0.75
    assert stats.tokens_per_forward == 2.5
    assert SpecDecodeCounter().snapshot() is None


def test_a_drafter_that_keeps_losing_is_reported(caplog) -> None:
    counter = SpecDecodeCounter(3)
    for _ in range(500):
        counter.count(3, 0)
    assert "0.0 % of the drafts" in caplog.text
    caplog.clear()
    for _ in range(500):
        counter.count(3, 1)
    assert not caplog.text
