"""A rank's place among the ranks of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atom.distributed.parallel_state import SINGLE, ParallelGroup


@dataclass(frozen=True)
class Place:
    """Which rank this is, and how it reaches the others.

    Attributes:
        tensor: the ranks that share every layer, for tensors on the device.
        control: the same ranks, for integers on the host.
        experts: the ranks of all engines that share the experts; of size 1 unless engines do.
        engines: the first ranks of these engines, for integers on the host.
        local_rank: among the ranks of this machine; the index of its device.
        num_local: ranks of this machine, which share its processors and memory.
    """

    tensor: ParallelGroup = SINGLE
    control: ParallelGroup = SINGLE
    experts: ParallelGroup = SINGLE
    engines: ParallelGroup = SINGLE
    local_rank: int = 0
    num_local: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank schedules and samples."""
        return self.tensor.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part in a step."""
        return self.tensor.size == 1 and not self.is_coupled

    @property
    def is_coupled(self) -> bool:
        """Whether each step is one of several engines."""
        return self.experts.size > 1


ALONE = Place()


def name_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
