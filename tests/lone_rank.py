"""A rank of several without the others, for what depends on shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom.distributed.parallel_state import ParallelGroup


class LoneCollectives:
    """Sums leave a rank's own part, and gathers repeat it.

    Attributes:
        calls: what was called, with the tensor's shape.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.Size]] = []

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.calls.append(("all_reduce", tensor.shape))

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self.calls.append(("all_gather", tensor.shape))
        out.view(-1, *tensor.shape).copy_(tensor)

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        raise AssertionError("tensor parallelism sends nothing to single ranks")

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.calls.append(("broadcast", tensor.shape))


def lone_rank(rank: int, size: int) -> tuple[ParallelGroup, LoneCollectives]:
    """The group of `rank`, and what it did in it."""
    collectives = LoneCollectives()
    return ParallelGroup(rank, size, collectives), collectives
