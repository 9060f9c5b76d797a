"""A line in the log now and then, while the engine has work."""

from __future__ import annotations

import asyncio
import logging

from atom.messages import EngineStats
from atom.model_engine.async_engine import AsyncEngine
from atom.stats import SpecDecodeStats

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


async def log_stats(engine: AsyncEngine, seconds: float = INTERVAL_SECONDS) -> None:
    """Log what happened in each interval, until cancelled; idle intervals are silent."""
    before = engine.stats
    while True:
        await asyncio.sleep(seconds)
        now = engine.stats
        if now.num_generation_tokens != before.num_generation_tokens or now.num_running:
            logger.info("%s", describe(before, now, seconds))
        before = now


def describe(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """At most 160 characters about the interval between two states of the engine."""
    prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    generation = (now.num_generation_tokens - before.num_generation_tokens) / seconds
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    parts = [
        f"{now.num_running} running, {now.num_waiting} waiting",
        f"{prompt:.0f} prompt and {generation:.0f} generated tokens/s",
        f"KV cache {now.kv_cache_usage:.1%}",
    ]
    if queries:
        parts.append(f"prefix hits {hits / queries:.1%}")
    if now.spec_decode is not None:
        drafts = now.spec_decode.since(before.spec_decode or SpecDecodeStats())
        parts.append(drafts.summary())
    return "; ".join(parts)
