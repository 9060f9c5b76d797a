"""Sums over the ranks that a norm completes, and where layers leave their parts of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.registry import OpChoice


def resolve_sum(size: int, context: LayerContext) -> OpChoice | None:
    """The op that sums rows of `size` over the ranks and norms them; None for one rank."""
    group = context.group
    if group.size == 1:
        return None
    return context.ops.resolve_weights(
        "all_reduce_add_rms_norm",
        context.dtype,
        None,
        size=size,
        num_ranks=group.size,
        peer_access=group.peer_access,
    )


def resolve_plain_sum(
    size: int, context: LayerContext
) -> Callable[[torch.Tensor, ParallelGroup], torch.Tensor] | None:
    """The op that sums rows of `size` over the ranks, maybe in place; None for one rank."""
    group = context.group
    if group.size == 1:
        return None
    found: Callable[[torch.Tensor, ParallelGroup], torch.Tensor] = context.ops.resolve(
        "all_reduce",
        context.dtype,
        size=size,
        num_ranks=group.size,
        peer_access=group.peer_access,
    )
    return found


class SumInput:
    """Memory that the next sum over the ranks reads without a copy.

    There is one for all layers: what is written there is read by the next sum, and nothing else
    is written there before it.

    Attributes:
        has_memory: whether there may be any; the sum else reads rows from anywhere, or copies.
    """

    def __init__(self, size: int, context: LayerContext) -> None:
        choice = resolve_sum(size, context)
        self._staging = None if choice is None else choice.staging
        self.has_memory = self._staging is not None
        self._size, self._context = size, context

    def rows(self, count: int) -> torch.Tensor | None:
        """[count, size] with any values; None where the sum reads rows from anywhere, or copies."""
        if self._staging is None:
            return None
        context = self._context
        return self._staging((count, self._size), context.dtype, context.device, context.group)
