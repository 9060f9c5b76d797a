"""Finds a model's attention layers and binds the KV cache to them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.attention.cached_attention import CachedAttention


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
