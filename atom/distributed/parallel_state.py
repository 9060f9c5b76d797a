"""The group of ranks that share a layer. Every parallel layer is built with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from atom.distributed.collectives import Collectives
from atom.options import ConfigError


@dataclass(frozen=True)
class ParallelGroup:
    """Ranks over which a layer's weights are split; of size 1 when nothing is.

    Attributes:
        rank, size: this process's place in the group.
        collectives: None when the size is 1, and where a rank's layers are only built.
        peer_access: whether kernels may sum by reading the other ranks' memory: all are on one
            machine, and any order of the sums will do.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = field(default=None, compare=False)
    peer_access: bool = False

    def divide(self, total: int, what: str) -> int:
        """This rank's share of `total`.

        Raises:
            ConfigError: when `total` does not split evenly.
        """
        if total % self.size:
            raise ConfigError(
                f"{what}={total} does not split over {self.size} ranks; change "
                f"--tensor-parallel-size"
            )
        return total // self.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place where there is more than one."""
        if self.size > 1:
            self._shared.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., n] of every rank -> [..., size * n]."""
        if self.size == 1:
            return tensor
        return self.stack(tensor).movedim(0, -2).flatten(-2)

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """[...] of every rank -> [size, ...]."""
        if self.size == 1:
            return tensor[None]
        parts = tensor.new_empty((self.size, *tensor.shape))
        self._shared.all_gather_into(parts.flatten(0, 1), tensor.contiguous())
        return parts

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in place."""
        if self.size > 1:
            self._shared.broadcast(tensor)
        return tensor

    def all_to_all(
        self, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        """Send `sent[r]` rows to rank r, in order -> `received[r]` rows of each rank r."""
        out = tensor.new_empty((sum(received), *tensor.shape[1:]))
        self._shared.all_to_all(out, tensor.contiguous(), received, sent)
        return out

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """The same number of integers of every rank; the group must be one of host tensors."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor([values], dtype=torch.int64)
        every = own.new_empty(self.size, len(values))
        self._shared.all_gather_into(every, own)
        return [[int(value) for value in row] for row in every.tolist()]

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """What every rank gives, of any length; the group must be one of host tensors."""
        if self.size == 1:
            return [data]
        lengths = [length for (length,) in self.exchange([len(data)])]
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        every = self.stack(own)
        return [bytes(row[:length].tolist()) for row, length in zip(every, lengths, strict=True)]

    @property
    def _shared(self) -> Collectives:
        if self.collectives is None:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} has nothing to reach the others by"
            )
        return self.collectives


SINGLE = ParallelGroup()
