"""Groups of ranks: the one that shares a layer, with which every parallel layer is built, and all
groups that one rank is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from atom.distributed.collectives import Collectives
from atom.options.fields import ConfigError


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


@dataclass(frozen=True)
class ParallelGroups:
    """Which rank of its engine this is, and how it reaches the others.

    Attributes:
        tp: the ranks that share every layer (tensor parallel), for tensors on the device.
        tp_cpu: the same ranks, for integers on the host.
        ep: the ranks of all engines that share the experts; of size 1 unless engines do.
        dp_cpu: the first ranks of these engines (data parallel), for integers on the host.
        local_rank: among the ranks of this machine; the index of its device.
        num_local: ranks of this machine, which share its processors and memory.
    """

    tp: ParallelGroup = SINGLE
    tp_cpu: ParallelGroup = SINGLE
    ep: ParallelGroup = SINGLE
    dp_cpu: ParallelGroup = SINGLE
    local_rank: int = 0
    num_local: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank schedules and samples."""
        return self.tp.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part in a step."""
        return self.tp.size == 1 and not self.is_coupled

    @property
    def is_coupled(self) -> bool:
        """Whether each step is one of several engines."""
        return self.ep.size > 1


ALONE = ParallelGroups()


def name_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
