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
    """

    renames: tuple[tuple[str, str], ...] = ()
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


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
class WeightNaming(WeightLoading, Protocol):
    """A module that itself knows the names of its many tensors, such as a mixture's experts."""

    def place_weight(self, name: str) -> tuple[str, str | None] | None:
        """Parameter and shard of checkpoint tensor `<module>.<name>`; None when it has none."""
        ...

    def weight_shards(self, name: str) -> tuple[str, ...]:
        """Every shard of parameter `name`, unless one tensor without a shard fills it."""
        ...
