"""Collectives: operations in which all ranks of a group take part, in the same order.

On a GPU they run on the current stream, and can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Collectives(Protocol):
    """What a group of ranks can do together. Tensors are contiguous, of the same shape and dtype on
    all ranks unless said otherwise.
    """

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        ...

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """[n, ...] of every rank -> [size * n, ...]."""
        ...

    def reduce_scatter_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """[size * n, ...] -> this rank's [n, ...] of the sum."""
        ...

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        """Send `sent[r]` rows to rank r, in order, and receive `received[r]` from it."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor to all ranks, in place."""
        ...


class TorchCollectives:
    """Over a process group of torch.distributed: NCCL or RCCL, or gloo on a CPU."""

    def __init__(self, handle: dist.ProcessGroup) -> None:
        self._handle = handle

    # The methods of the group itself: the functions of torch.distributed know only groups that
    # were registered for the whole process.
    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._handle.allreduce([tensor]).wait()

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._handle._allgather_base(out, tensor).wait()

    def reduce_scatter_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._handle._reduce_scatter_base(out, tensor, dist.ReduceScatterOptions()).wait()

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        self._handle.alltoall_base(out, tensor, list(received), list(sent)).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._handle.broadcast(tensor, 0).wait()
