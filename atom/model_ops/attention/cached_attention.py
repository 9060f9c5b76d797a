"""The interface between attention layers and the paged KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from atom.model_ops.attention.metadata import CacheTensor


@dataclass(frozen=True)
class StoredPart:
    """One layer's view of a pool, for one of its parts.

    Attributes:
        tensor: [num_blocks, block_size, *shape of the part].
        scale: [1] float32 for an FP8 cache, else None; value = stored number * scale.
    """

    tensor: torch.Tensor
    scale: torch.Tensor | None


class CachedAttention(nn.Module, ABC):
    """An attention layer that stores something per token in the paged cache.

    The layer alone defines what; the cache allocates it. A new kind of attention is a new subclass.

    Attributes:
        kv_cache: bound before the first forward.
    """

    kv_cache: CacheTensor

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, its own included; None for all before it."""
        return None

    @abstractmethod
    def stored_parts(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each part that one token stores.

        Parts with the same shape are stored in one pool, in this order.
        """

    def storage_of(self, storage: torch.dtype) -> torch.dtype:
        """The dtype in which the parts are stored, where that of the cache is `storage`."""
        return storage

    @abstractmethod
    def stored_scales(self, storage: torch.dtype) -> torch.Tensor:
        """[parts] float32, in the order of `stored_parts`, for an FP8 `storage`."""

    @abstractmethod
    def view_cache(self, parts: Mapping[str, StoredPart]) -> CacheTensor:
        """The parts, in the form that this layer's ops take."""

    @abstractmethod
    def bind_kv_cache(self, cache: CacheTensor) -> None:
        """Use `cache`, made by `view_cache`, and select the ops for it.

        Raises:
            TypeError: when the cache is of another kind of attention.
        """
