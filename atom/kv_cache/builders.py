"""Finds a model's attention layers, creates the KV cache for them and binds it to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from atom.kv_cache.base import KVCacheBuilder
from atom.kv_cache.paged import PagedCache
from atom.kv_cache.state_pool import StatePool
from atom.model_ops.attention.cached_attention import CachedAttention

if TYPE_CHECKING:
    from atom.kv_cache.windows import WindowMap


def attention_layers(model: nn.Module) -> dict[int, CachedAttention]:
    """The attention modules by layer id, in model order."""
    return dict(enumerate(m for m in model.modules() if isinstance(m, CachedAttention)))


def bind_kv_caches(model: nn.Module, builders: Sequence[KVCacheBuilder]) -> None:
    """Bind each attention layer of `model` to its view of the allocated pools.

    Raises:
        RuntimeError: when a layer belongs to no builder.
    """
    for layer_id, module in attention_layers(model).items():
        views = (builder.build_kv_cache_tensor(layer_id, module) for builder in builders)
        view = next((view for view in views if view is not None), None)
        if view is None:
            raise RuntimeError(f"no KV cache builder serves attention layer {layer_id}")
        module.bind_kv_cache(view)


@dataclass(frozen=True)
class CacheBuilders:
    """The caches of a target and its draft.

    Attributes:
        others: with the blocks of the pool.
        windowed: of the target's layers with a window, with blocks of their own; None if they have
            the pool's.
        windows: the map between the two.
        states: of the target's layers with a recurrent state, which have no blocks.
    """

    others: Sequence[KVCacheBuilder]
    windowed: PagedCache | None
    windows: WindowMap | None
    states: StatePool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        windows: WindowMap | None,
        drafts: Sequence[KVCacheBuilder],
        states: StatePool,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> CacheBuilders:
        """Args:
        drafts: those of the proposer.
        dtype: storage dtype.
        """
        layers = attention_layers(model)
        where = block_size, dtype, device
        if windows is None:
            return cls([PagedCache(layers, *where), *drafts], None, None, states)
        own = {i: layer for i, layer in layers.items() if layer.window is not None}
        rest = {i: layer for i, layer in layers.items() if layer.window is None}
        windowed = PagedCache(own, *where, prefix="windowed_", is_windowed=True)
        return cls([PagedCache(rest, *where), *drafts], windowed, windows, states)

    @property
    def all(self) -> list[KVCacheBuilder]:
        return [*self.others] if self.windowed is None else [*self.others, self.windowed]

    def bytes_of(self, num_blocks: int, num_window_blocks: int) -> int:
        """Of pools of so many blocks."""
        found = num_blocks * sum(builder.compute_block_bytes() for builder in self.others)
        if self.windowed is not None:
            found += num_window_blocks * self.windowed.compute_block_bytes()
        return found

    def allocate(self, num_blocks: int, num_window_blocks: int) -> None:
        """Allocate all pools; those of states once."""
        self.states.allocate()
        for builder in self.others:
            builder.allocate_kv_cache_tensors(num_blocks)
        if self.windowed is not None and self.windows is not None:
            self.windowed.allocate_kv_cache_tensors(num_window_blocks)
            self.windows.allocate(num_blocks)
