"""The engine's own counts by the names that `/metrics` and `LLM.get_metrics` give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atom.messages import EngineStats


@dataclass(frozen=True)
class EngineMetric:
    """One number; a counter never falls while the engine lives."""

    name: str
    kind: Literal["gauge", "counter"]
    description: str
    value: float


def engine_metrics(stats: EngineStats) -> list[EngineMetric]:
    """What `stats` holds; drafts and images only where there are some."""
    gauges = [
        ("num_requests_running", "Sequences in the running batch.", stats.num_running),
        ("num_requests_waiting", "Sequences waiting to be scheduled.", stats.num_waiting),
        ("kv_cache_usage_ratio", "Share of KV blocks in use.", stats.kv_cache_usage),
        ("kv_cache_blocks", "KV blocks there are.", stats.num_blocks),
        ("kv_cache_used_blocks", "KV blocks that live sequences hold.", stats.num_used_blocks),
    ]
    counters: list[tuple[str, str, float]] = [
        ("generation_tokens", "Tokens generated.", stats.num_generation_tokens),
        ("steps", "Steps of the engine.", stats.num_steps),
        ("decode_steps", "Steps that computed no prompts.", stats.num_decode_steps),
        (
            "replayed_decode_steps",
            "Those whose target was a graph, or a recorded program on a CPU.",
            stats.num_replayed_decode_steps,
        ),
        (
            "replayed_choice_steps",
            "Decode steps whose choice of tokens was a graph, or a recorded program on a CPU.",
            stats.num_replayed_choice_steps,
        ),
        (
            "mixed_steps",
            "Steps that computed prompts beside sequences that decode.",
            stats.num_mixed_steps,
        ),
        ("preemptions", "Sequences preempted.", stats.num_preemptions),
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        ),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
    ]
    if stats.mm_cache_queries:
        counters += [
            ("mm_cache_queries", "Images that sequences needed.", stats.mm_cache_queries),
            ("mm_cache_hits", "Those whose rows were known.", stats.mm_cache_hits),
            ("encoder_seconds", "Time spent encoding the others.", stats.encoder_seconds),
        ]
    if (spec := stats.spec_decode) is not None:
        steps = "Sequences' steps in which drafts were verified."
        counters += [
            ("spec_decode_num_drafts", steps, spec.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts verified.", spec.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", spec.num_accepted_tokens),
            ("draft_steps", "Decode steps in which a draft model ran.", stats.num_draft_steps),
            (
                "replayed_draft_steps",
                "Those whose draft model was a graph, or a recorded program on a CPU.",
                stats.num_replayed_draft_steps,
            ),
        ]
        held = "Tokens of live sequences and recent outputs that drafts are looked up in."
        gauges.append(("spec_decode_lookup_tokens", held, stats.num_lookup_tokens))
    return [
        *(EngineMetric(f"atom:{name}", "gauge", text, value) for name, text, value in gauges),
        *(EngineMetric(f"atom:{name}", "counter", text, value) for name, text, value in counters),
    ]
