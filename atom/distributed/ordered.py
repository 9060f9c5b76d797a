"""Sums over ranks in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from atom.distributed.collectives import Collectives
from atom.distributed.parallel_state import ParallelGroup

_HALF = (torch.bfloat16, torch.float16)


def in_order(group: ParallelGroup) -> ParallelGroup:
    """The same ranks with sums in a fixed order."""
    if group.collectives is None:
        return group
    ordered = OrderedCollectives(group.collectives, group.size)
    return replace(group, collectives=ordered, peer_access=False)


class OrderedCollectives:
    """Sums in the order of the ranks, so that they depend on nothing but the numbers.

    A library chooses the order by the tensor's size, the number of ranks and how they are
    connected, and so the rounding. Here every rank gets all numbers and adds them itself; those of
    16 bits in float32.
    """

    def __init__(self, collectives: Collectives, size: int) -> None:
        self._collectives = collectives
        self._size = size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        parts = tensor.new_empty(self._size * tensor.numel())
        self._collectives.all_gather_into(parts, tensor.view(-1))
        first, *others = parts.view(self._size, *tensor.shape)
        total = first.to(torch.float32 if tensor.dtype in _HALF else tensor.dtype)
        for part in others:
            total = total + part
        tensor.copy_(total)

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._collectives.all_gather_into(out, tensor)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        self._collectives.all_to_all(out, tensor, received, sent)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._collectives.broadcast(tensor)
