"""A rank of a rehearsal: its models on the meta device, with what goes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from atom.batch import Lookahead
from atom.config import EngineConfig
from atom.distributed.parallel_state import ParallelGroup, ParallelGroups
from atom.graphs.runner import ForwardOp, GraphRunner
from atom.model_engine.expert_ranks import check_experts
from atom.model_engine.rank import Rank
from atom.model_engine.rank_parts import RankParts, join_parts
from atom.model_engine.step.planned_graphs import plan_graphs
from atom.model_loader.source import ModelSource
from atom.model_loader.weights import build_model
from atom.model_ops.moe import FusedMoE
from atom.model_ops.registry import OpTable
from atom.model_ops.stacked import PreparedMatrix
from atom.models.base import CausalLM
from atom.models.registry import create_model
from atom.plan.rehearsal.meter import Meter
from atom.plan.rehearsal.registry import Registry
from atom.platform import Platform
from atom.spec_decode.factory import create_proposer

META = torch.device("meta")


class _Collectives:
    """Each is a launch; what others would send is whatever is there."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._meter.launched("collectives")

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._meter.launched("collectives")

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        self._meter.launched("collectives")

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._meter.launched("collectives")


class _NoCapture:
    """The graphs are planned, and none is captured."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


@dataclass(frozen=True)
class Setting:
    """What all ranks of a rehearsal have in common.

    Attributes:
        registry: the implementations of ops to choose from.
    """

    config: EngineConfig
    source: ModelSource
    platform: Platform
    registry: Registry
    meter: Meter


@dataclass(frozen=True)
class BuiltRank:
    """A rank with all that its steps need but the KV cache."""

    rank: Rank
    parts: RankParts

    @classmethod
    def build(cls, setting: Setting, number: int) -> BuiltRank:
        """Raises:
        ConfigError: when a model cannot be built, or an option not be honoured.
        OpUnavailableError: when no kernel runs, or not the one demanded.
        """
        config, source = setting.config, setting.source
        rank = Rank.create(config, _groups(setting, number), setting.platform, source)
        table = OpTable(setting.platform, setting.registry, config.batch_invariant)
        rank = replace(rank, context=replace(rank.context, ops=table, device=META))
        create = partial(create_model, source.hf_config, wanted=config.model.model_impl)
        model = build_model(create, source, rank.context, config.model)
        check_experts(config, rank.groups, setting.platform, source.name, model)
        proposer = create_proposer(config, model, source, rank.context)
        model.set_aux_layer_ids(proposer.aux_layer_ids)
        return cls(rank, join_parts(rank, model, proposer, _planned_graphs))


def _planned_graphs(
    rank: Rank, model: CausalLM, forward: ForwardOp, lookahead: Lookahead
) -> GraphRunner | None:
    if rank.config.graphs.enforce_eager or model.op_by_op is not None:
        return None
    return plan_graphs(rank, forward, lookahead, _NoCapture())


def _groups(setting: Setting, number: int) -> ParallelGroups:
    parallel = setting.config.parallel
    size = parallel.tensor_parallel_size
    if size == 1:
        return ParallelGroups()
    local = -(-size // parallel.nnodes)
    return ParallelGroups(
        tp=ParallelGroup(number, size, _Collectives(setting.meter)),
        local_rank=number % local,
        num_local=local,
    )


def held_weight_bytes(*models: nn.Module) -> int:
    """Of parameters and buffers, and of what ops made of quantised weights; what is shared counts
    once.
    """
    modules = {id(module): module for model in models for module in model.modules()}
    tensors = {
        id(tensor): tensor
        for module in modules.values()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    for module in modules.values():
        if isinstance(module, PreparedMatrix | FusedMoE):
            total += module.quantised_bytes
    return total
