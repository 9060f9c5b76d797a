"""What an attention layer says to the paged cache: what it stores, and how it reads that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from atom.model_ops.metadata import CacheTensor


@dataclass(frozen=True)
class StoredPart:
    """One layer's share of a pool, for one of the parts that it stores.

    Attributes:
        tensor: [num_blocks, block_size, *shape of the part].
        scale: [1] float32 where the cache is stored in 8 bits, else None; what is stored times
            the scale is the real number.
    """

    tensor: torch.Tensor
    scale: torch.Tensor | None


class CachedAttention(nn.Module, ABC):
    """An attention layer that keeps something of every token in the paged cache.

    What that is, the layer alone knows: the cache allocates the parts that it is asked for. A new
    kind of attention is a new subclass.

    Attributes:
        kv_cache: bound before the first forward.
    """

    kv_cache: CacheTensor

    @abstractmethod
    def stored_parts(self) -> Mapping[str, tuple[int, ...]]:
        """What one token stores: the shape of each part by its name.

        Parts of the same shape lie one after another in one pool, in this order.
        """

    @abstractmethod
    def stored_scales(self, storage: torch.dtype) -> torch.Tensor:
        """[parts] float32, in the order of `stored_parts`, for a `storage` of 8 bits."""

    @abstractmethod
    def view_cache(self, parts: Mapping[str, StoredPart]) -> CacheTensor:
        """The parts by name, as this layer's ops take them."""

    @abstractmethod
    def bind_kv_cache(self, cache: CacheTensor) -> None:
        """Use `cache`, from `view_cache`, from now on, with the ops that suit it.

        Raises:
            TypeError: when the cache is of another attention's kind.
        """
