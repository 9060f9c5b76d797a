"""Maps a checkpoint's tensors to a model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True)
class WeightMapping:
    """Attributes:
    renames: checkpoint prefix -> model prefix; the first match applies.
    packed: fused module name -> the checkpoint modules that it stacks, in order.
    adopted: checkpoint module that the model may lack -> the module beside it that places its
        tensors then, by names that begin with the missing one's.
    ignored: regular expressions of checkpoint tensors that are deliberately not loaded.
    modules: checkpoint's name of a module, anywhere in a tensor's name -> the model's; "" for one
        that the model does not have, but what is in it.
    place: checkpoint's name -> the model's, and its part of a packed parameter; None if the others
        say it.
    """

    renames: tuple[tuple[str, str], ...] = ()
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    adopted: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    place: Callable[[str], tuple[str, str | None]] | None = None


@runtime_checkable
class WeightLoading(Protocol):
    """A module that loads checkpoint tensors into its parameters itself."""

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Copy `tensor` into parameter `name`; `shard` names its part of a packed parameter.

        Raises:
            ValueError: with both shapes, when they do not match.
        """
        ...


@runtime_checkable
class ConvertsWeights(Protocol):
    """A module that converts its weights once after loading.

    Attributes:
        dequantised_bytes: what takes the place of quantised weights; 0 if they stay quantised.
    """

    @property
    def dequantised_bytes(self) -> int: ...

    def process_after_loading(self) -> None:
        """Convert the weights to the layout that the module's op reads.

        Raises:
            ValueError: when their values are of no use.
        """
        ...


@runtime_checkable
class WeightNaming(WeightLoading, Protocol):
    """A module that also maps tensor names, such as the experts of a mixture."""

    def place_weight(self, name: str) -> tuple[str, str | None] | None:
        """Parameter and shard for checkpoint tensor `<module>.<name>`; None if there is none."""
        ...

    def weight_shards(self, name: str) -> tuple[str, ...]:
        """All shards of parameter `name`; a single tensor without a shard may fill it instead."""
        ...

    def covers(self, name: str, shard: str) -> tuple[str, ...]:
        """The shards of parameter `name` that a tensor placed as `shard` fills."""
        ...

    def holds(self, shard: str) -> bool:
        """Whether this rank loads a shard, or only others do."""
        ...


# Whether the modules of a class have the members of a protocol.
_has_members: dict[tuple[type, type], bool] = {}


def loads_weights(module: nn.Module) -> TypeGuard[WeightLoading]:
    """Whether a module is `WeightLoading`."""
    return _is(module, WeightLoading)


def names_weights(module: nn.Module) -> TypeGuard[WeightNaming]:
    """Whether a module is `WeightNaming`."""
    return _is(module, WeightNaming)


def converts_weights(module: nn.Module) -> TypeGuard[ConvertsWeights]:
    """Whether a module is `ConvertsWeights`."""
    return _is(module, ConvertsWeights)


def _is(module: nn.Module, protocol: Any) -> bool:
    """`isinstance`, once for each class: it compares member by member, and models have thousands
    of modules.
    """
    key = type(module), protocol
    if key not in _has_members:
        _has_members[key] = isinstance(module, protocol)
    return _has_members[key]
