from __future__ import annotations

import msgspec

from atom.messages import EngineLimits, EngineStats
from atom.model_engine.replicas.total_stats import common_limits, counters_of, total_stats
from atom.stats import SpecDecodeStats

STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_blocks=100,
    block_size=16,
    kv_cache_dtype="bfloat16",
    num_used_blocks=3,
    num_preemptions=4,
    num_prompt_tokens=5,
    num_generation_tokens=6,
    prefix_cache_queries=7,
    prefix_cache_hits=8,
    spec_decode=SpecDecodeStats(num_drafts=1, num_draft_tokens=2, accepted_counts=[0, 1]),
)


def test_the_sum_and_what_an_engine_leaves() -> None:
    assert total_stats([STATS]) == STATS
    both = total_stats([STATS, counters_of(STATS)])
    assert both == EngineStats(
        num_running=1,
        num_waiting=2,
        num_blocks=100,
        block_size=16,
        kv_cache_dtype="bfloat16",
        num_used_blocks=3,
        num_preemptions=8,
        num_prompt_tokens=10,
        num_generation_tokens=12,
        prefix_cache_queries=14,
        prefix_cache_hits=16,
        spec_decode=SpecDecodeStats(num_drafts=2, num_draft_tokens=4, accepted_counts=[0, 2]),
    )
    assert total_stats([EngineStats(), EngineStats()]).spec_decode is None


def test_a_request_must_fit_in_every_engine() -> None:
    large = EngineLimits(
        max_model_len=400, num_blocks=50, block_size=16, vocab_size=300, max_logprobs=5
    )
    small = msgspec.structs.replace(large, max_model_len=300, num_blocks=40)
    assert common_limits([large, small, large]) == small
