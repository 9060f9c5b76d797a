"""Whole experts on different ranks: who holds which, and how tokens get to them.

A spread is called with the function that runs this rank's experts, rows and their choices, and
returns this rank's part of a sum over the ranks that share the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup

# (x [T, hidden], weights [T, k], ids [T, k] of this rank's experts) -> [T, hidden]
RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class HeldExperts:
    """The experts of one rank: a range of all. If they do not divide, the first ranks hold one
    more.

    Attributes:
        first, count: the range.
        elsewhere: number of experts that other ranks hold.

    Raises:
        ConfigError: when there are fewer experts than ranks.
    """

    def __init__(self, num_experts: int, ranks: ParallelGroup) -> None:
        self._few, self._num_larger = divmod(num_experts, ranks.size)
        if not self._few:
            raise ConfigError(
                f"the model's {num_experts} experts do not spread over {ranks.size} ranks; each "
                f"must hold one"
            )
        self.first = ranks.rank * self._few + min(ranks.rank, self._num_larger)
        self.count = self._few + (ranks.rank < self._num_larger)
        self.elsewhere = num_experts - self.count

    def __contains__(self, expert: int) -> bool:
        return self.first <= expert < self.first + self.count

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids among this rank's experts; `count` for those elsewhere."""
        places = ids - self.first
        return places.masked_fill((places < 0) | (places >= self.count), self.count)

    def ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """The ranks that hold these experts, int64."""
        bound = self._num_larger * (self._few + 1)
        larger, others = ids // (self._few + 1), (ids - bound) // self._few + self._num_larger
        return torch.where(ids < bound, larger, others).long()


class Spread(Protocol):
    def __call__(
        self, run: RunExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor: ...


class EveryExpert:
    """This rank has a part of every expert, or all of all."""

    def __call__(
        self, run: RunExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return run(x, weights, ids)


class OwnExperts:
    """Every rank has all tokens, and adds what its own experts make of them."""

    def __init__(self, held: HeldExperts) -> None:
        self._held = held

    def __call__(
        self, run: RunExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        return run(x, weights, self._held.places(ids))


class TokensToExperts:
    """Ranks have different tokens: rows travel to the ranks that hold their experts, and back.

    The ranks that share the layer have the same tokens. Each sends its share of them, and returns
    their rows in a tensor that is 0 elsewhere. A row's sum is in float32 and in the order of ranks,
    so it does not depend on other tokens. The host waits for the number of rows.

    Args:
        experts: all ranks that hold experts.
        group: the ranks that share the layer.
    """

    def __init__(self, held: HeldExperts, experts: ParallelGroup, group: ParallelGroup) -> None:
        self._held = held
        self._experts = experts
        self._group = group

    def __call__(
        self, run: RunExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        own = share_of_rows(len(x), self._group)
        rows = self._compute(run, x[own], weights[own], ids[own])
        if self._group.size == 1:
            return rows
        out = torch.zeros_like(x)
        out[own] = rows
        return out

    def _compute(
        self, run: RunExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        size = self._experts.size
        goes = torch.zeros(len(x), size, dtype=torch.bool, device=x.device)
        goes.scatter_(1, self._held.ranks(ids), True)
        # By rank, then by token.
        tokens = goes.T.nonzero()[:, 1]
        sent, received = self._count(goes.sum(0))
        rows = self._experts.all_to_all(x[tokens], received, sent)
        choices = torch.cat((weights[tokens].view(torch.int32), ids[tokens].int()), dim=1)
        choices = self._experts.all_to_all(choices, received, sent)
        their_weights, their_ids = choices.chunk(2, dim=1)
        if len(rows):
            places = self._held.places(their_ids)
            rows = run(rows, their_weights.contiguous().view(torch.float32), places)
        rows = self._experts.all_to_all(rows, sent, received)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        parts = torch.split_with_sizes(rows, sent), torch.split_with_sizes(tokens, sent)
        for of_rank, where in zip(*parts, strict=True):
            out.index_add_(0, where, of_rank.float())
        return out.to(x.dtype)

    def _count(self, sent: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows sent to each rank, and received from each."""
        ones = [1] * self._experts.size
        received = self._experts.all_to_all(sent, ones, ones)
        both: list[list[int]] = torch.stack((sent, received)).tolist()
        return both[0], both[1]


def create_spread(held: HeldExperts, experts: ParallelGroup, group: ParallelGroup) -> Spread:
    """How tokens and experts meet in a layer of the ranks in `group`."""
    if experts.size == 1:
        return EveryExpert()
    if experts.size == group.size:
        return OwnExperts(held)
    return TokensToExperts(held, experts, group)


def share_of_rows(count: int, group: ParallelGroup) -> slice:
    """This rank's share of `count` rows; the last ranks may have fewer, or none."""
    share = -(-count // group.size)
    return slice(min(group.rank * share, count), min((group.rank + 1) * share, count))
