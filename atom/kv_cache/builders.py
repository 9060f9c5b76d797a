"""Which KV caches a target model needs, and which layer gets what of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atom.kv_cache.base import KVCacheBuilder, MHACacheBuilder
from atom.kv_cache.mla import MLACacheBuilder
from atom.model_ops.attention_mha import Attention
from atom.model_ops.attention_mla import MLAAttention


def attention_layers(model: nn.Module) -> dict[int, Attention | MLAAttention]:
    """The attention modules in the order of their layers."""
    modules = [m for m in model.modules() if isinstance(m, (Attention, MLAAttention))]
    return dict(enumerate(modules))


def target_cache_builders(
    model: nn.Module, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[MHACacheBuilder | MLACacheBuilder]:
    """One builder per kind of attention in `model`; `dtype` is that of the cache."""
    layers = attention_layers(model)
    mha = {i: layer for i, layer in layers.items() if isinstance(layer, Attention)}
    mla = {i: layer for i, layer in layers.items() if isinstance(layer, MLAAttention)}
    builders: list[MHACacheBuilder | MLACacheBuilder] = []
    if mha:
        builders.append(MHACacheBuilder(mha, block_size, dtype, device))
    if mla:
        builders.append(MLACacheBuilder(mla, block_size, dtype, device))
    return builders


def bind_kv_caches(model: nn.Module, builders: Sequence[KVCacheBuilder]) -> None:
    """Give every attention layer of `model` its share of the allocated pools.

    Raises:
        RuntimeError: when no builder serves a layer.
    """
    for layer_id, module in attention_layers(model).items():
        views = (builder.build_kv_cache_tensor(layer_id, module) for builder in builders)
        view = next((view for view in views if view is not None), None)
        if view is None:
            raise RuntimeError(f"no KV cache builder serves attention layer {layer_id}")
        module.bind_kv_cache(view)
