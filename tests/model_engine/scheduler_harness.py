"""What the scheduler's tests share: a scheduler over a small pool, and a model told what to say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from atom.batch import NO_LOOKAHEAD, Lookahead, ScheduledBatch, SequenceResult, StepOutput
from atom.config import SchedulerOptions
from atom.messages import EngineLimits, EngineRequest, SequenceOutput, WindowLimits
from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduler import Scheduler
from atom.sampling_params import SamplingParams

EOS = 0
A, B = 10, 11  # ordinary tokens


class Bench:
    """A scheduler over a pool of blocks of 4 tokens, with a model that says what it is told."""

    def __init__(
        self,
        num_blocks: int = 16,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        lookahead: Lookahead = NO_LOOKAHEAD,
        window: WindowLimits | None = None,
        **options: Any,
    ) -> None:
        self.pool = BlockPool(num_blocks, 4, enable_prefix_caching)
        limits = EngineLimits(
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=4,
            vocab_size=1000,
            max_logprobs=5,
            window=window,
        )
        self.scheduler = Scheduler(
            SchedulerOptions(**options), self.pool, limits, frozenset({EOS}), lookahead
        )

    def add(
        self, id: str, prompt: Iterable[int], priority: int = 0, salt: str = "", **params: Any
    ) -> None:
        self.scheduler.add(
            EngineRequest(
                id=id,
                prompt_token_ids=list(prompt),
                params=SamplingParams(**params),
                seed=0,
                priority=priority,
                cache_salt=salt,
            )
        )

    def finish(
        self,
        batch: ScheduledBatch,
        says: dict[str, list[int]] | None = None,
        drafts: list[int] | None = None,
    ) -> dict[str, SequenceOutput]:
        """Answer a batch.

        Sampled rows get what `says` has for them, else one token A; and `drafts` for the next step.
        """
        results = [
            SequenceResult((says or {}).get(s.id, [A]), draft_token_ids=drafts or [])
            if s.wants_sample
            else SequenceResult([])
            for s in batch.sequences
        ]
        outputs = self.scheduler.update(batch, StepOutput(results))
        self.scheduler.check_integrity()
        return {output.id: output for output in outputs}

    def step(
        self, says: dict[str, list[int]] | None = None, drafts: list[int] | None = None
    ) -> tuple[ScheduledBatch, dict[str, SequenceOutput]]:
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return batch, self.finish(batch, says, drafts)

    def run(self, says: dict[str, list[int]] | None = None) -> dict[str, list[SequenceOutput]]:
        """Step until nothing is left; all outputs by id."""
        collected: dict[str, list[SequenceOutput]] = {}
        while self.scheduler.has_unfinished:
            for id, output in self.step(says)[1].items():
                collected.setdefault(id, []).append(output)
        assert self.pool.num_used == 0
        return collected


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def rows(batch: ScheduledBatch) -> dict[str, tuple[int, int]]:
    """id -> (start, number of tokens)."""
    return {s.id: (s.start, len(s.token_ids)) for s in batch.sequences}


def rows_of(batch: ScheduledBatch) -> dict[str, int]:
    """Where the runner keeps each sequence."""
    return {s.id: s.row for s in batch.sequences}


def ids(batch: ScheduledBatch) -> list[str]:
    return [s.id for s in batch.sequences]
