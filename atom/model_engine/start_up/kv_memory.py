"""Allocates the KV cache of a rank: as many blocks as memory allows beside the largest steps."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from atom.batch import RankStep
from atom.config import ConfigError
from atom.kv_cache.base import KVCacheMemoryError, WindowNeed, num_spare_blocks, plan_kv_cache
from atom.kv_cache.builders import CacheBuilders, bind_kv_caches
from atom.kv_cache.memory import check_room, kv_cache_budget
from atom.messages import WindowLimits
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.rank import Rank, dtype_name
from atom.model_engine.rank_parts import RankParts, blocks_of_steps
from atom.model_engine.runner_parts import create_runner
from atom.model_engine.start_up.largest_steps import largest_steps
from atom.model_engine.start_up.same_ops import check_same_ops
from atom.model_engine.step.step_images import FullStepImages, StepImages
from atom.sampling.failure import SamplingFailedError
from atom.spec_decode.drafter import Drafter

logger = logging.getLogger(__name__)


def allocate_kv_cache(
    rank: Rank, parts: RankParts, runner: ModelRunner
) -> tuple[int, WindowLimits | None]:
    """Size the pool, allocate it and bind it to the attention layers. Returns its blocks, and those
    of layers with a window if they have others.

    Args:
        runner: has the graphs that will be captured.

    Raises:
        KVCacheMemoryError: when there is too little memory, with the numbers.
    """
    block_size, scheduler = rank.config.cache.block_size, rank.config.scheduler
    builders = create_builders(rank, parts)

    def profile() -> None:
        allocate_pools(rank, builders, parts, 1, 1)
        _encode_largest(rank, parts)
        _run_largest_steps(rank, parts)

    graph_bytes = runner.steps.estimate_graph_bytes
    budget = kv_cache_budget(
        rank.config.cache,
        rank.platform,
        profile,
        graph_bytes,
        rank.groups.num_local,
        builders.states.num_bytes,
    )
    if rank.config.cache.kv_cache_memory is None and parts.model.image_encoder is not None:
        budget -= rank.config.cache.mm_cache_memory
    builders.states.check(budget)
    plan = plan_kv_cache(
        budget,
        [builder.compute_block_bytes() for builder in builders.others],
        block_size,
        # Every sequence has blocks of its own.
        scheduler.max_num_seqs * block_size * -(-rank.context.max_model_len // block_size),
        num_spare_blocks(rank.context.device),
        window_need(rank, builders),
    )
    plans = rank.groups.tp_cpu.exchange([plan.num_blocks, plan.num_window_blocks])
    num_blocks, own_blocks = (min(own) for own in zip(*plans, strict=True))
    if rank.config.cache.kv_cache_memory is not None:
        # By now all ranks have loaded their weights.
        pools = builders.states.num_bytes + builders.bytes_of(num_blocks, own_blocks)
        check_room(pools, rank.platform, rank.groups.num_local)
    allocate_pools(rank, builders, parts, num_blocks, own_blocks)
    if rank.groups.is_first:
        _log_limits(rank, plan.block_bytes)
    if parts.windows is None:
        return num_blocks, None
    window = parts.windows.window
    return num_blocks, WindowLimits(window.num_tokens, window.tile, own_blocks)


def create_builders(rank: Rank, parts: RankParts) -> CacheBuilders:
    """The caches of a rank's models."""
    drafts = parts.proposer.kv_cache_builders
    where = rank.config.cache.block_size, rank.storage, rank.context.device
    return CacheBuilders.of(parts.model, parts.windows, drafts, parts.states, *where)


def window_need(rank: Rank, builders: CacheBuilders) -> WindowNeed | None:
    """What layers with a window take; None where they have no blocks of their own."""
    if builders.windowed is None or builders.windows is None:
        return None
    return WindowNeed(
        builders.windowed.compute_block_bytes(),
        builders.windows.window.per_sequence,
        blocks_of_steps(rank),
        rank.config.scheduler.max_num_seqs,
    )


def fit_context(rank: Rank, num_blocks: int) -> int:
    """The context length, reduced to what the KV cache can hold.

    Raises:
        ConfigError: when the user asked for more than fits.
    """
    context_len = rank.context.max_model_len
    capacity = num_blocks * rank.config.cache.block_size
    if capacity >= context_len:
        return context_len
    if rank.config.model.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={context_len} needs {context_len} tokens of KV cache and there is "
            f"memory for {capacity} in {dtype_name(rank.storage)}; lower it, or raise "
            f"--kv-cache-memory"
        )
    logger.warning(
        "the KV cache holds %d tokens in %s, so the context is that instead of %d",
        capacity,
        dtype_name(rank.storage),
        context_len,
    )
    return capacity


def allocate_pools(
    rank: Rank, builders: CacheBuilders, parts: RankParts, num_blocks: int, num_window_blocks: int
) -> None:
    """Allocate pools of so many blocks and bind the layers of a rank's models to them."""
    builders.allocate(num_blocks, num_window_blocks)
    for model in parts.models:
        bind_kv_caches(model, builders.all)
    # Which has chosen ops by the size of the pool.
    check_same_ops(rank.groups, rank.context.ops)


def _log_limits(rank: Rank, block_bytes: int) -> None:
    """Warn of implementations that run for a smaller pool only, and say which."""
    num_spare = num_spare_blocks(rank.context.device)
    for limit in rank.context.ops.pool_limits():
        logger.warning(
            "%s does not run %s: %s; with --kv-cache-memory %d (%d blocks of %d tokens) it does",
            limit.name,
            " and ".join(limit.ops),
            limit.reason,
            limit.most_blocks * block_bytes,
            limit.most_blocks - num_spare,
            rank.config.cache.block_size,
        )


@torch.inference_mode()
def _encode_largest(rank: Rank, parts: RankParts) -> None:
    """Encode the largest image that there may be."""
    encoder, context = parts.model.image_encoder, rank.context
    if encoder is None:
        return
    shape, grid = encoder.largest_input()
    try:
        encoder(torch.zeros(shape, dtype=context.dtype, device=context.device), grid)
    except torch.OutOfMemoryError as error:
        raise KVCacheMemoryError(
            f"the device has no memory to encode the largest image, {list(shape)}: {error}; lower "
            f"--max-num-batched-tokens, or load no encoder with --limit-mm-per-prompt image=0"
        ) from error


def _run_largest_steps(rank: Rank, parts: RankParts) -> None:
    """Run the steps that need the most memory, with a pool of one block.

    Raises:
        KVCacheMemoryError: when the device runs out of memory.
    """
    # Always the full number of drafts, and these steps do not count in choosing their number.
    drafter = Drafter(parts.proposer, "largest", None, None, sync_is_free=False)
    runner = create_runner(rank, replace(parts, drafter=drafter))
    images = runner.inputs.images
    if isinstance(images, StepImages):
        runner.inputs.images = FullStepImages(images, parts.model.token_embedding)
    context_len, most = rank.context.max_model_len, parts.drafter.max_drafts
    try:
        for batch in largest_steps(rank.config, context_len, most, rank.vocab_size):
            if rank.groups.is_first:
                runner.launch(batch).collect()
            else:
                runner.follow(RankStep.of(batch, drafter.max_drafts))
    except (torch.OutOfMemoryError, SamplingFailedError) as failed:
        error = failed.cause if isinstance(failed, SamplingFailedError) else failed
        if not isinstance(error, torch.OutOfMemoryError):
            raise error from None
        scheduler = rank.config.scheduler
        raise KVCacheMemoryError(
            f"the device has no memory for the largest step that the options allow "
            f"({scheduler.max_num_batched_tokens} tokens, {scheduler.max_num_seqs} sequences "
            f"of up to {context_len} tokens, {most} drafts each): {error}; lower "
            f"--max-num-batched-tokens, --max-num-seqs or --max-model-len"
        ) from error
