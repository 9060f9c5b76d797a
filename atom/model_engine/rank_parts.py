"""The parts of a rank: its models, and what drafts, compiles grammars, captures and records."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from atom.batch import Lookahead
from atom.config import DEFAULT_STATE_SLOTS, ConfigError, EngineConfig
from atom.distributed.stages import Stages
from atom.graphs.recorded import StepRecorder, create_recorder
from atom.graphs.runner import ForwardOp, GraphRunner
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.cache_window import CacheWindow
from atom.kv_cache.state_pool import StatePool, recurrent_layers
from atom.kv_cache.windows import WindowedForward, WindowMap
from atom.model_engine.compiled_grammars import create_grammars
from atom.model_engine.expert_ranks import check_experts
from atom.model_engine.rank import Rank
from atom.model_engine.start_up.same_ops import check_same_ops
from atom.model_engine.step.planned_graphs import create_graph_runner
from atom.model_loader.source import ModelSource
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.registry import create_model
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.factory import create_drafter
from atom.spec_decode.proposers.base import Proposer
from atom.structured_output.cache import GrammarCache

logger = logging.getLogger(__name__)

# (rank, model, its layers, lookahead) -> graphs, nothing captured yet; None if nothing will be
GraphRunnerFactory = Callable[[Rank, CausalLM, ForwardOp, Lookahead], "GraphRunner | None"]
# (config, target model, its source, layer context) -> proposer
ProposerFactory = Callable[[EngineConfig, CausalLM, ModelSource, LayerContext], Proposer]


@dataclass(frozen=True)
class RankParts:
    """What a rank's runners are made of.

    Attributes:
        model: the target.
        forward: its layers.
        windows: where those with a sliding window have blocks of their own; None if they have not.
        graphs: of its layers; None if every step runs eagerly.
        recorder: replays steps that recur; None if every step runs op by op.
        grammars: only the first rank has any.
        states: of the target's layers that have recurrent ones.
    """

    model: CausalLM
    forward: ForwardOp
    windows: WindowMap | None
    proposer: Proposer
    graphs: GraphRunner | None
    recorder: StepRecorder | None
    grammars: GrammarCache | None
    drafter: Drafter
    states: StatePool

    @property
    def models(self) -> list[nn.Module]:
        """The target, and the draft if there is one."""
        draft = self.proposer.draft_model
        return [self.model] if draft is None else [self.model, draft]


def build_parts(rank: Rank, create_proposer: ProposerFactory, stages: Stages) -> RankParts:
    """Load the models, and build what goes with them.

    Args:
        stages: told where this is.

    Raises:
        ConfigError: when an option cannot be honoured with them.
        WeightError: when weights are missing or wrong.
    """
    model, proposer = _load_models(rank, create_proposer, stages)
    stages.begin("creating the runner")
    return join_parts(rank, model, proposer, create_graph_runner)


def join_parts(
    rank: Rank, model: CausalLM, proposer: Proposer, create_graphs: GraphRunnerFactory
) -> RankParts:
    """A rank's models, with what goes with them.

    Raises:
        ConfigError: when an option cannot be honoured with them.
    """
    windows = _create_windows(rank, model)
    forward: ForwardOp = model.forward
    if windows is not None:
        places = rank.context.ops.resolve("window_places", rank.context.dtype)
        forward = WindowedForward(forward, windows, places)
    graphs = create_graphs(rank, model, forward, proposer.lookahead)
    grammars = create_grammars(rank.config.model, rank.source) if rank.groups.is_first else None
    recorder = create_recorder(rank.platform) if graphs is None and _records(rank, model) else None
    drafter = create_drafter(
        rank.config.speculative,
        proposer,
        captured=() if graphs is None else graphs.plan.query_lens,
        # Other ranks must know the number of drafts before the step, and so must the next step.
        sync_is_free=not rank.platform.is_gpu and rank.groups.is_alone and not rank.overlaps,
        is_ahead=rank.overlaps,
        recorder=recorder,
        caps=bool(recurrent_layers(model)),
    )
    states = _create_states(rank, model, drafter)
    return RankParts(model, forward, windows, proposer, graphs, recorder, grammars, drafter, states)


def _create_states(rank: Rank, model: CausalLM, drafter: Drafter) -> StatePool:
    """Raises:
    ConfigError: when states are to be kept that there are not.
    """
    cache, scheduler = rank.config.cache, rank.config.scheduler
    layers, slots = recurrent_layers(model), cache.state_slots
    if slots is not None and not layers:
        raise ConfigError(f"--state-slots {slots}: {rank.source.name} has no recurrent states")
    if cache.mamba_ssm_cache_dtype != "float32" and not layers:
        raise ConfigError(
            f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype}: {rank.source.name} has no "
            f"recurrent states; leave it out"
        )
    if not cache.enable_prefix_caching or not layers:
        slots = 0
    elif not scheduler.enable_chunked_prefill:
        if slots:
            raise ConfigError(f"--state-slots {slots} needs --enable-chunked-prefill")
        slots = 0
    elif slots is None:
        slots = DEFAULT_STATE_SLOTS
    if layers and rank.groups.is_first:
        logger.info(
            "%d recurrent states are kept for prefix caching%s",
            slots,
            "" if slots else ": it is off",
        )
    device = rank.context.device
    return StatePool(layers, scheduler.max_num_seqs, drafter.max_drafts, device, slots)


def blocks_of_steps(rank: Rank) -> int:
    """Blocks that the tokens of the steps fill that are in flight together."""
    steps = 2 if rank.overlaps else 1
    return -(-steps * rank.config.scheduler.max_num_batched_tokens // rank.config.cache.block_size)


def _create_windows(rank: Rank, model: CausalLM) -> WindowMap | None:
    """Blocks of their own for layers with a window; None if they would save nothing."""
    sizes = [layer.window for layer in attention_layers(model).values()]
    windows = [size for size in sizes if size is not None]
    if not windows:
        return None
    device, block_size = rank.context.device, rank.config.cache.block_size
    window = CacheWindow.of(max(windows), block_size, on_gpu=device.type != "cpu")
    num_seqs, in_context = rank.config.scheduler.max_num_seqs, rank.context.max_model_len
    wanted = num_seqs * window.per_sequence + blocks_of_steps(rank)
    if wanted >= num_seqs * -(-in_context // block_size):
        return None
    return WindowMap(window, device)


def _load_models(
    rank: Rank, create_proposer: ProposerFactory, stages: Stages
) -> tuple[CausalLM, Proposer]:
    """The target, and the proposer with the draft."""
    config, source, context = rank.config, rank.source, rank.context

    def agree() -> None:
        stages.begin("waiting for the other ranks")
        check_same_ops(rank.groups, context.ops)

    def checked() -> None:
        # Ranks that differ are told before they load for minutes.
        agree()
        stages.begin("loading the weights")

    stages.begin("reading the checkpoint")
    create = partial(create_model, source.hf_config, wanted=config.model.model_impl)
    model = build_model(create, source, context, config.model, checked)
    check_experts(config, rank.groups, rank.platform, source.name, model)
    proposer = create_proposer(config, model, source, context)
    # Ranks load at their own speed. Whoever failed is noticed here: the first collective on a GPU
    # would wait for it for ever.
    agree()
    model.set_aux_layer_ids(proposer.aux_layer_ids)
    return model, proposer


def _records(rank: Rank, model: CausalLM) -> bool:
    """Whether steps are recorded where they can be: ranks wait for each other in the middle of a
    step.
    """
    eager = rank.config.graphs.enforce_eager
    return rank.groups.is_alone and not rank.overlaps and not eager and model.op_by_op is None
