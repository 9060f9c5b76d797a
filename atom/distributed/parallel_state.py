"""The group of ranks that share a layer. Every parallel layer is built with one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParallelGroup:
    """Ranks over which a layer's weights are split; of size 1 when nothing is.

    Attributes:
        rank, size: this process's place in the group.
        handle: the torch.distributed group; None when the size is 1.
    """

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    def divide(self, total: int, what: str) -> int:
        """This rank's share of `total`.

        Raises:
            ValueError: when `total` does not split evenly.
        """
        if total % self.size:
            raise ValueError(f"{what}={total} does not split over {self.size} ranks")
        return total // self.size

    def shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's slice of `tensor` along `dim`."""
        if self.size == 1:
            return tensor
        share = self.divide(tensor.shape[dim], f"dimension {dim}")
        return tensor.narrow(dim, self.rank * share, share)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place where there is more than one."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors along the last dimension."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.handle)
        return torch.cat(parts, dim=-1)


SINGLE = ParallelGroup()
