"""Which ranks hold whole experts, and what cannot be honoured with them."""

from __future__ import annotations

from torch import nn

from atom.config import ConfigError, EngineConfig
from atom.distributed.parallel_state import SINGLE, ParallelGroup, ParallelGroups
from atom.model_ops.moe import FusedMoE
from atom.platform import Platform


def expert_ranks(
    config: EngineConfig, groups: ParallelGroups, layer_ranks: ParallelGroup
) -> ParallelGroup:
    """The ranks that hold whole experts; of size 1 if `layer_ranks` split experts like layers."""
    if not config.parallel.enable_expert_parallel:
        return SINGLE
    return groups.ep if groups.is_coupled else layer_ranks


def has_spread_experts(model: nn.Module | None) -> bool:
    """Whether a model has experts on other ranks."""
    return any(experts.is_spread for experts in _experts(model))


def check_experts(
    config: EngineConfig, groups: ParallelGroups, platform: Platform, name: str, model: nn.Module
) -> None:
    """Refuse expert parallelism that cannot be honoured.

    Args:
        name: the model's.

    Raises:
        ConfigError: without experts, or with graphs of a step that the host has a part in.
    """
    parallel = config.parallel
    if not parallel.enable_expert_parallel:
        return
    if not _experts(model):
        raise ConfigError(
            f"enable_expert_parallel has no effect on {name}, which has no experts; leave it out"
        )
    if groups.is_coupled and platform.is_gpu and not config.graphs.enforce_eager:
        raise ConfigError(
            f"enable_expert_parallel with data_parallel_size={parallel.data_parallel_size} cannot "
            f"capture graphs, since the host counts the rows that ranks exchange; add "
            f"--enforce-eager"
        )


def _experts(model: nn.Module | None) -> list[FusedMoE]:
    return [] if model is None else [m for m in model.modules() if isinstance(m, FusedMoE)]
