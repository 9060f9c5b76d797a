"""How a checkpoint's tensors find their place in a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class WeightMapping:
    """Attributes:
    renames: prefix in the checkpoint -> prefix in the model, the first that fits.
    packed: fused module name -> the checkpoint's modules that it stacks, in order.
    ignored: regular expressions of checkpoint tensors that are knowingly not used.
    experts: name of the modules that hold a mixture's experts. `P.experts.3.gate_proj.weight`
        goes to module `P.experts` with shard `3.gate_proj`; `P.experts.gate_up_proj`, all
        experts in one tensor, goes to the same module under that name, without a shard.
    """

    renames: tuple[tuple[str, str], ...] = ()
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    experts: str | None = None


@runtime_checkable
class WeightLoading(Protocol):
    """A module that places checkpoint tensors into its parameters itself."""

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Copy `tensor` into parameter `name`; `shard` names the part of a packed one.

        Raises:
            ValueError: with both shapes, when they do not fit.
        """
        ...


@runtime_checkable
class ExpertLoading(WeightLoading, Protocol):
    """A module that holds a mixture's experts."""

    def expert_shards(self) -> tuple[str, ...]:
        """Every shard that a checkpoint with one tensor per matrix must bring."""
        ...

    def stacked_names(self) -> tuple[str, ...]:
        """What a checkpoint with all experts in one tensor must bring instead."""
        ...
