"""Collectives: operations in which all ranks of a group take part, in the same order.

On a GPU they run on the current stream, and can be captured in a graph. A torch without `asyncOp`
in its options has a stream of its own for them, which the current one waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions


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
        self._sum = _on_current_stream(dist.AllreduceOptions())
        self._gather = _on_current_stream(AllgatherOptions())
        self._exchange = _on_current_stream(AllToAllOptions())
        self._copy = _on_current_stream(dist.BroadcastOptions())
        self._copy.rootRank = 0

    # The methods of the group itself: the functions of torch.distributed know only groups that
    # were registered for the whole process.
    def all_reduce(self, tensor: torch.Tensor) -> None:
        _wait(self._handle.allreduce([tensor], self._sum))

    def all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        _wait(self._handle._allgather_base(out, tensor, self._gather))

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        work = self._handle.alltoall_base(out, tensor, list(received), list(sent), self._exchange)
        _wait(work)

    def broadcast(self, tensor: torch.Tensor) -> None:
        _wait(self._handle.broadcast([tensor], self._copy))


def _on_current_stream(options: Any) -> Any:
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _wait(work: dist.Work | None) -> None:
    """NCCL returns no work for what is on the current stream; gloo always does."""
    if work is not None:
        work.wait()
