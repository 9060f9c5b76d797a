"""The interface between layers with a recurrent state and the pool of states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class StatePart:
    """One of the tensors that make up a state.

    Attributes:
        shape: of one version, which is for one position.
        dtype: of its numbers.
        reach: how many versions before a step's first token the step reads, at least 1.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    reach: int = 1

    def num_versions(self, most_drafts: int) -> int:
        """Those that must be kept where a step's last `most_drafts` tokens may be rejected.

        The next step then begins at any of so many positions and one more, and reads `reach`
        versions before its own.
        """
        return most_drafts + self.reach


class RecurrentLayer(nn.Module, ABC):
    """A layer whose output depends on a state of constant size instead of on cached tokens.

    The layer alone defines what; the pool allocates it. Each running sequence has a row of the
    pool, and `StateMetadata` says what is in it.
    """

    @abstractmethod
    def state_parts(self) -> Mapping[str, StatePart]:
        """The parts of a state by name. Layers that have the same share a pool for each."""

    @abstractmethod
    def bind_states(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Use these pools, [rows, versions, *shape of the part], by the names of the parts."""
