"""The parts of a rank: its models, and what drafts, compiles grammars, captures and records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from atom.config import EngineConfig
from atom.distributed.stages import Stages
from atom.graphs.recorded import StepRecorder, create_recorder
from atom.graphs.runner import GraphRunner
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

# (config, target model, its source, layer context) -> proposer
ProposerFactory = Callable[[EngineConfig, CausalLM, ModelSource, LayerContext], Proposer]


@dataclass(frozen=True)
class RankParts:
    """What a rank's runners are made of.

    Attributes:
        model: the target.
        graphs: of its layers; None if every step runs eagerly.
        recorder: replays steps that recur; None if every step runs op by op.
        grammars: only the first rank has any.
    """

    model: CausalLM
    proposer: Proposer
    graphs: GraphRunner | None
    recorder: StepRecorder | None
    grammars: GrammarCache | None
    drafter: Drafter

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
    return join_parts(rank, model, proposer, create_graph_runner(rank, model, proposer.lookahead))


def join_parts(
    rank: Rank, model: CausalLM, proposer: Proposer, graphs: GraphRunner | None
) -> RankParts:
    """A rank's models, with what goes with them.

    Raises:
        ConfigError: when an option cannot be honoured with them.
    """
    grammars = create_grammars(rank.config.model, rank.source) if rank.groups.is_first else None
    recorder = create_recorder(rank.platform) if graphs is None and _records(rank, model) else None
    drafter = create_drafter(
        rank.config.speculative,
        proposer,
        captured=() if graphs is None else graphs.query_lens,
        # Other ranks must know the number of drafts before the step, and so must the next step.
        waiting_is_free=not rank.platform.is_gpu and rank.groups.is_alone and not rank.overlaps,
        is_ahead=rank.overlaps,
        recorder=recorder,
    )
    return RankParts(model, proposer, graphs, recorder, grammars, drafter)


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
