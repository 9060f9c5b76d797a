"""What the scheduler counts since the start."""

from __future__ import annotations

import msgspec

from atom.batch import Lookahead, ScheduledBatch, StepOutput
from atom.messages import EngineLimits, EngineStats
from atom.model_engine.sequence import DraftCounts, Sequence
from atom.stats import SpecDecodeCounter


class SchedulerCounts:
    """Totals. Prompt tokens are counted once, with the first output token, cached or not. Prefix
    cache queries and hits are counted at the first admission only, so that a preempted sequence
    that finds its own blocks does not count as a hit.
    """

    def __init__(self, limits: EngineLimits, lookahead: Lookahead) -> None:
        self._spec = SpecDecodeCounter(lookahead.num_tokens, lookahead.expected_acceptance)
        # Verifications since the last step ended, counted by value.
        self._verified: dict[DraftCounts, int] = {}
        self._totals = EngineStats(
            num_blocks=limits.num_blocks,
            num_window_blocks=0 if limits.window is None else limits.window.num_blocks,
            block_size=limits.block_size,
            kv_cache_dtype=limits.kv_cache_dtype,
            expected_acceptance=lookahead.expected_acceptance,
        )

    def preempted(self) -> None:
        self._totals.num_preemptions += 1

    def matched(self, seq: Sequence) -> None:
        """A sequence was admitted whose prompt was looked up in the prefix cache."""
        self._totals.prefix_cache_queries += seq.num_prompt_tokens
        self._totals.prefix_cache_hits += seq.num_cached_tokens

    def computed_prompt(self, seq: Sequence) -> None:
        self._totals.num_prompt_tokens += seq.num_prompt_tokens

    def generated(self, num_tokens: int, verified: DraftCounts | None) -> None:
        self._totals.num_generation_tokens += num_tokens
        if verified is not None:
            self._verified[verified] = self._verified.get(verified, 0) + 1

    def step_ended(self, batch: ScheduledBatch, output: StepOutput) -> None:
        for (num_drafts, num_accepted, source), times in self._verified.items():
            self._spec.count(num_drafts, num_accepted, source, times)
        self._verified.clear()
        self._totals.num_lookup_tokens = output.num_lookup_tokens
        totals, parts = self._totals, output.parts
        if output.encoder is not None:
            totals.mm_cache_queries += output.encoder.queries
            totals.mm_cache_hits += output.encoder.hits
            totals.encoder_seconds += output.encoder.seconds
        totals.num_steps += 1
        if 0 < batch.num_decoding < len(batch.sequences):
            totals.num_mixed_steps += 1
        elif batch.num_decoding:
            totals.num_decode_steps += 1
            totals.num_replayed_decode_steps += parts.target
            totals.num_replayed_choice_steps += parts.sample
            totals.num_draft_steps += parts.drafts is not None
            totals.num_replayed_draft_steps += parts.drafts is True

    def stats(
        self,
        num_running: int,
        num_waiting: int,
        num_used_blocks: int,
        num_used_window_blocks: int,
    ) -> EngineStats:
        return msgspec.structs.replace(
            self._totals,
            num_running=num_running,
            num_waiting=num_waiting,
            num_used_blocks=num_used_blocks,
            num_used_window_blocks=num_used_window_blocks,
            spec_decode=self._spec.snapshot(),
        )
