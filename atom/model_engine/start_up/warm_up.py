"""What a GPU runs before an engine is ready: no request waits while kernels are compiled."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

import torch

from atom.batch import LaunchedStep, RankStep, ScheduledBatch
from atom.config import DEFAULT_MAX_LOGPROBS
from atom.kv_cache.base import KVCacheMemoryError
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.rank import Rank
from atom.model_engine.rank_parts import RankParts
from atom.model_engine.start_up.warm_up_steps import StepLimits, WarmUp, warm_ups
from atom.sampling.failure import SamplingFailedError
from atom.spec_decode.drafter import Drafter

logger = logging.getLogger(__name__)


def warm_up(rank: Rank, parts: RankParts, runner: ModelRunner, num_blocks: int) -> None:
    """Run steps of every kind on the pool as it will be, and forget them.

    Every rank of all engines calls it at the same time.

    Args:
        runner: with its graphs captured.
        num_blocks: of the KV pool.

    Raises:
        KVCacheMemoryError: when the device runs out of memory.
    """
    started = time.perf_counter()
    # These steps do not count in choosing numbers of drafts, and no lookup learns of them.
    drafter = Drafter(parts.proposer, "warm-up", None, None, sync_is_free=False)
    own = runner.rehearsing(drafter)
    limits = warm_up_limits(rank, parts.drafter.max_drafts, num_blocks)
    count = 0
    try:
        for steps in warm_ups(limits):
            if rank.groups.is_first:
                run(own, steps.batches, depth=2 if rank.overlaps else 1)
            else:
                for batch in steps.batches:
                    num_drafts = drafter.begin(batch.num_drafting).made
                    own.follow(RankStep.of(batch, num_drafts, steps.kind))
            _forget(own, steps, is_first=rank.groups.is_first)
            count += len(steps.batches)
    except (torch.OutOfMemoryError, SamplingFailedError) as failed:
        error = failed.cause if isinstance(failed, SamplingFailedError) else failed
        if not isinstance(error, torch.OutOfMemoryError):
            raise error from None
        raise KVCacheMemoryError(
            f"the device has no memory for a step of {limits.max_num_tokens} tokens beside a KV "
            f"cache of {num_blocks} blocks: {error}; lower --kv-cache-memory, "
            f"--gpu-memory-utilization or --max-num-batched-tokens"
        ) from error
    seconds = time.perf_counter() - started
    logger.info("warmed up with %d steps in %.1f s", count, seconds)


def run(runner: ModelRunner, batches: Iterable[ScheduledBatch], depth: int) -> None:
    """Run batches with up to `depth` of them launched."""
    launched: deque[LaunchedStep] = deque()
    for batch in batches:
        launched.append(runner.launch(batch))
        if len(launched) == depth:
            launched.popleft().collect()
    while launched:
        launched.popleft().collect()


def _forget(runner: ModelRunner, steps: WarmUp, *, is_first: bool) -> None:
    nothing = ScheduledBatch([], [], list(range(steps.num_rows)))
    if is_first:
        runner.launch(nothing).collect()
    else:
        runner.follow(RankStep.of(nothing, 0))


def warm_up_limits(rank: Rank, num_drafts: int, num_blocks: int) -> StepLimits:
    """What bounds the steps of `warm_ups`."""
    scheduler, given = rank.config.scheduler, rank.config.max_logprobs
    return StepLimits(
        context_len=rank.context.max_model_len,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        num_drafts=num_drafts,
        block_size=rank.config.cache.block_size,
        num_blocks=num_blocks,
        vocab_size=rank.vocab_size,
        max_logprobs=given if given >= 0 else DEFAULT_MAX_LOGPROBS,
        overlaps=rank.overlaps,
    )
