"""The recurrent states of running sequences.

A sequence's states are in the row that it has anyway from its first step to its last, so nothing is
allocated or freed in steps. The version for a token at position p is p modulo the number of
versions, so nothing counts which drafts were accepted: `StateMetadata` says what follows from that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from atom.kv_cache.base import KVCacheMemoryError
from atom.kv_cache.paged import zeroed_pool
from atom.model_ops.attention.recurrent_layer import RecurrentLayer, StatePart


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


class StatePool:
    """Pools [layers, rows + 1, versions, *shape of the part], one for each kind of part.

    The row at their end is for padding alone.

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
    ) -> None:
        self._layers = layers
        self._num_rows = num_rows
        self._most_drafts = most_drafts
        self._device = device
        self._pools = _share(layers)
        self._is_allocated = False

    @property
    def num_bytes(self) -> int:
        """Of all pools."""
        return sum(math.prod(self._shape(p)) * p.part.dtype.itemsize for p in self._pools)

    @property
    def row_bytes(self) -> int:
        """Of one row over all layers, with all its versions."""
        return self.num_bytes // (self._num_rows + 1)

    def describe(self) -> str:
        """What takes the memory, in words."""
        return (
            f"the recurrent states of {self._num_rows} sequences and a spare row, with "
            f"{self._most_drafts + 1} versions for {self._most_drafts} drafts, are "
            f"{self._num_rows + 1} x {self.row_bytes} = {self.num_bytes} bytes"
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
                f"--max-num-seqs or --num-speculative-tokens, or raise --kv-cache-memory or "
                f"--gpu-memory-utilization"
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
                states = zeroed_pool(self._shape(pool), pool.part.dtype, self._device)
                for layer, own in zip(pool.layers, states, strict=True):
                    bound.setdefault(layer, {})[pool.name] = own
        except torch.OutOfMemoryError as error:
            raise KVCacheMemoryError(
                f"{self.describe()}, and there is no room: {error}; lower --max-num-seqs or "
                f"--num-speculative-tokens"
            ) from error
        for layer, parts in bound.items():
            layer.bind_states(parts)
        self._is_allocated = True

    def _shape(self, pool: _Pool) -> tuple[int, ...]:
        versions = pool.part.num_versions(self._most_drafts)
        return len(pool.layers), self._num_rows + 1, versions, *pool.part.shape


def _share(layers: Iterable[RecurrentLayer]) -> list[_Pool]:
    """The pools, in the order in which layers first need them."""
    pools: dict[tuple[str, StatePart], _Pool] = {}
    for layer in layers:
        for name, part in layer.state_parts().items():
            pools.setdefault((name, part), _Pool(name, part)).layers.append(layer)
    return list(pools.values())
