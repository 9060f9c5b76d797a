"""Protocols for the storage and multiplication of linear weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from atom.model_ops.layer_context import LayerContext
    from atom.model_ops.linear import LinearBase


class QuantMethod(Protocol):
    """The storage format of one linear layer's weights."""

    def create_weights(self, layer: LinearBase, context: LayerContext) -> None:
        """Register the parameters that the checkpoint fills, [out_features, in_features]."""
        ...

    def load(self, layer: LinearBase, name: str, tensor: torch.Tensor, offset: int) -> None:
        """Copy a shard, already cut to this rank, to output row `offset` of parameter `name`."""
        ...

    def process_after_loading(self, layer: LinearBase) -> None:
        """Convert the weights to the layout that `apply` needs, once."""
        ...

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in_features] -> [..., out_features]."""
        ...


class QuantConfig(Protocol):
    """A checkpoint's quantisation: selects the method of each layer."""

    def method_for(self, prefix: str) -> QuantMethod:
        """The method of the layer at `prefix` in the checkpoint."""
        ...
