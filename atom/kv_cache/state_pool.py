"""The recurrent states of running sequences.

A sequence's states are in the row that it has anyway from its first step to its last, so nothing is
allocated or freed in steps. The version for a token at position p is p modulo the number of
versions, so nothing counts which drafts were accepted: `StateMetadata` says what follows from that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from atom.kv_cache.base import KVCacheMemoryError
from atom.kv_cache.paged import zeroed_pool
from atom.model_ops.attention.recurrent_layer import RecurrentLayer, StatePart

if TYPE_CHECKING:
    from atom.batch import ScheduledBatch


def recurrent_layers(model: nn.Module) -> list[RecurrentLayer]:
    """The layers with a recurrent state, in model order."""
    return [module for module in model.modules() if isinstance(module, RecurrentLayer)]


@dataclass(frozen=True)
class _Pool:
    """Layers that share a pool.

    Attributes:
        layers: by their places in the pool.
    """

    name: str
    part: StatePart
    layers: list[RecurrentLayer] = field(default_factory=list)

    def bytes_of(self, versions: int) -> int:
        """Of so many versions in all layers."""
        elements = len(self.layers) * versions * math.prod(self.part.shape)
        return elements * self.part.dtype.itemsize


class StatePool:
    """Pools [layers, rows + 1, versions, *shape of the part], one for each kind of part.

    The row at their end is for padding alone. Beside them are slots for states that are kept when
    their sequences have gone on, [layers, slots, reach, *shape], newest version first.

    Args:
        layers: in model order; there may be none.
        num_rows: most sequences that run at once.
        most_drafts: most drafts of a sequence that a step verifies, whoever makes them.
    """

    def __init__(
        self,
        layers: Sequence[RecurrentLayer],
        num_rows: int,
        most_drafts: int,
        device: torch.device,
        num_slots: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self._num_rows = num_rows
        self._most_drafts = most_drafts
        self._device = device
        self._pools = _share(layers)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_allocated = False
        # Row, tokens and slot of states that the newest step writes.
        self._to_keep: list[tuple[int, int, int]] = []

    @property
    def has_layers(self) -> bool:
        return bool(self._pools)

    @property
    def num_bytes(self) -> int:
        """Of all pools."""
        return (self._num_rows + 1) * self.row_bytes + self.num_slots * self._slot_bytes

    @property
    def row_bytes(self) -> int:
        """Of one row over all layers, with all its versions."""
        return sum(pool.bytes_of(pool.part.num_versions(self._most_drafts)) for pool in self._pools)

    @property
    def _slot_bytes(self) -> int:
        return sum(pool.bytes_of(pool.part.reach) for pool in self._pools)

    def describe(self) -> str:
        """What takes the memory, in words."""
        return (
            f"the recurrent states of {self._num_rows} sequences and a spare row, with "
            f"{self._most_drafts + 1} versions for {self._most_drafts} drafts, and "
            f"{self.num_slots} that are kept for prefix caching, are {self._num_rows + 1} x "
            f"{self.row_bytes} + {self.num_slots} x {self._slot_bytes} = {self.num_bytes} bytes"
        )

    def check(self, budget_bytes: int) -> None:
        """Refuse a budget that the states leave nothing of.

        Args:
            budget_bytes: what is left of it beside them.

        Raises:
            KVCacheMemoryError: with the numbers.
        """
        if self._pools and budget_bytes <= 0:
            raise KVCacheMemoryError(
                f"{self.describe()}, which leaves {budget_bytes} bytes for the KV cache; lower "
                f"--max-num-seqs, --num-speculative-tokens or --state-slots, or raise "
                f"--kv-cache-memory or --gpu-memory-utilization"
            )

    def allocate(self) -> None:
        """Allocate the pools, unless they are, and bind the layers to them.

        Raises:
            KVCacheMemoryError: when the device has not so much memory.
        """
        if self._is_allocated:
            return
        try:
            bound: dict[RecurrentLayer, dict[str, torch.Tensor]] = {}
            for pool in self._pools:
                rows = self._num_rows + 1, pool.part.num_versions(self._most_drafts)
                states = self._zeroed(pool, *rows)
                self._tensors.append((states, self._zeroed(pool, self.num_slots, pool.part.reach)))
                for layer, own in zip(pool.layers, states, strict=True):
                    bound.setdefault(layer, {})[pool.name] = own
        except torch.OutOfMemoryError as error:
            raise KVCacheMemoryError(
                f"{self.describe()}, and there is no room: {error}; lower --max-num-seqs, "
                f"--num-speculative-tokens or --state-slots"
            ) from error
        for layer, parts in bound.items():
            layer.bind_states(parts)
        self._is_allocated = True

    def start(self, batch: ScheduledBatch) -> None:
        """Before a step: keep the states that the step before it wrote, then bring back those that
        its sequences start from.
        """
        for row, tokens, slot in self._to_keep:
            for pool, kept in self._tensors:
                for i in range(min(kept.shape[2], tokens)):
                    kept[:, slot, i] = pool[:, row, (tokens - 1 - i) % pool.shape[2]]
        self._to_keep = []
        for s in batch.sequences:
            if s.load_state is not None:
                for pool, kept in self._tensors:
                    for i in range(min(kept.shape[2], s.start)):
                        pool[:, s.row, (s.start - 1 - i) % pool.shape[2]] = kept[:, s.load_state, i]
            if s.keep_state is not None:
                self._to_keep.append((s.row, s.context_len, s.keep_state))

    def _zeroed(self, pool: _Pool, rows: int, versions: int) -> torch.Tensor:
        shape = len(pool.layers), rows, versions, *pool.part.shape
        return zeroed_pool(shape, pool.part.dtype, self._device)


def _share(layers: Iterable[RecurrentLayer]) -> list[_Pool]:
    """The pools, in the order in which layers first need them."""
    pools: dict[tuple[str, StatePart], _Pool] = {}
    for layer in layers:
        for name, part in layer.state_parts().items():
            pools.setdefault((name, part), _Pool(name, part)).layers.append(layer)
    return list(pools.values())


# Of a target without recurrent layers.
NO_STATES = StatePool([], num_rows=0, most_drafts=0, device=torch.device("cpu"))
