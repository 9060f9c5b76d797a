"""Which of a rank's steps are captured as graphs."""

from __future__ import annotations

import logging

from atom.batch import Lookahead
from atom.config import ConfigError
from atom.graphs.capture import (
    CaptureBackend,
    GraphPlan,
    capture_backend,
    default_batch_sizes,
    default_context_bounds,
    query_lengths,
)
from atom.graphs.runner import ForwardOp, GraphRunner
from atom.model_engine.rank import Rank
from atom.models.base import CausalLM
from atom.options.speculative import MAX_SPECULATIVE_TOKENS
from atom.spec_decode.proposers.base import Proposer

logger = logging.getLogger(__name__)


def create_graph_runner(
    rank: Rank, model: CausalLM, forward: ForwardOp, lookahead: Lookahead
) -> GraphRunner | None:
    """The graph runner, nothing captured yet; None if every step runs eagerly.

    Args:
        forward: the model's layers.

    Raises:
        ConfigError: for --cudagraph-capture-sizes on a device without graphs.
    """
    config, sizes = rank.config, rank.config.graphs.capture_sizes
    backend = None if config.graphs.enforce_eager else capture_backend(rank.platform)
    why = f" on a {rank.platform.kind}: there are no graphs to capture; leave it out"
    if model.op_by_op is not None:
        logger.info("steps run op by op: %s", model.op_by_op)
        backend, why = None, f": steps run op by op, as {model.op_by_op}"
    if backend is not None:
        return plan_graphs(rank, forward, lookahead, backend)
    if sizes is not None:
        raise ConfigError(f"cudagraph_capture_sizes={list(sizes)} has no effect{why}")
    return None


def plan_graphs(
    rank: Rank, forward: ForwardOp, lookahead: Lookahead, backend: CaptureBackend
) -> GraphRunner:
    """The graph runner with the graphs that the options want, nothing captured yet."""
    config = rank.config
    options, num_drafts = config.speculative, lookahead.num_tokens
    varying = options is not None and (options.adaptive or options.looks_up)
    lens = query_lengths(num_drafts, varying=varying)
    if options is not None and options.lookup:
        lens = tuple(sorted({1 + num_drafts, *query_lengths(MAX_SPECULATIVE_TOKENS, varying=True)}))
    plan = GraphPlan(
        backend,
        config.graphs.capture_sizes or default_batch_sizes(config.scheduler.max_num_seqs),
        default_context_bounds(rank.context.max_model_len, lens[-1] - 1),
        lens,
        config.cache.block_size,
        rank.context.device,
    )
    return GraphRunner(forward, plan)


def draft_numbers(rank: Rank, proposer: Proposer) -> tuple[int, ...]:
    """The numbers of drafts for which a proposer's work is captured behind the target's graphs."""
    most, options = proposer.lookahead.num_tokens, rank.config.speculative
    if not proposer.reads_steps or not most:
        return ()
    is_adaptive = options is not None and options.adaptive
    return (0, most) if is_adaptive else (most,)
