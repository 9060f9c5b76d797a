"""Each kind of attention gets the cache it needs, sized as it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atom.kv_cache.base import MHACacheBuilder
from atom.kv_cache.builders import attention_layers, bind_kv_caches, target_cache_builders
from atom.kv_cache.mla import MLACacheBuilder
from atom.model_ops.attention_mha import Attention
from atom.model_ops.attention_mla import MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.metadata import KVCacheTensor, LatentCacheTensor
from atom.platform import cpu_platform

CPU = torch.device("cpu")
CONTEXT = LayerContext.create(torch.float32, 8, cpu_platform())


def mha() -> Attention:
    return Attention(4, 2, 8, 1.0, CONTEXT)


def mla(rank: int = 16) -> MLAAttention:
    return MLAAttention(4, rank, 4, 8, 1.0, CONTEXT)


def test_keys_and_values() -> None:
    model = nn.ModuleList([mha(), nn.Linear(1, 1), mha()])
    (builder,) = target_cache_builders(model, 16, torch.bfloat16, CPU)
    assert isinstance(builder, MHACacheBuilder)
    assert builder.compute_block_bytes() == 2 * 2 * 16 * 2 * 8 * 2
    pools = builder.allocate_kv_cache_tensors(5)
    assert {key: tuple(pool.shape) for key, pool in pools.items()} == {
        "kv_cache": (2, 2, 5, 16, 2, 8)
    }
    assert pools["kv_cache"].nbytes == 5 * builder.compute_block_bytes()
    assert pools["kv_cache"].dtype == torch.bfloat16
    bind_kv_caches(model, [builder])
    last = attention_layers(model)[1].kv_cache
    assert isinstance(last, KVCacheTensor)
    assert last.block_size == 16
    last.value.fill_(1)
    assert pools["kv_cache"].sum() == pools["kv_cache"][1, 1].numel()


def test_latents() -> None:
    model = nn.ModuleList([mla(), mla(), mla()])
    (builder,) = target_cache_builders(model, 4, torch.float32, CPU)
    assert isinstance(builder, MLACacheBuilder)
    assert builder.compute_block_bytes() == 3 * 4 * (16 + 4) * 4
    pools = builder.allocate_kv_cache_tensors(7)
    assert tuple(pools["kv_cache"].shape) == (3, 7, 4, 20)
    assert pools["kv_cache"].nbytes == 7 * builder.compute_block_bytes()
    bind_kv_caches(model, [builder])
    middle = attention_layers(model)[1].kv_cache
    assert isinstance(middle, LatentCacheTensor)
    assert middle.block_size == 4
    middle.latent.fill_(1)
    assert pools["kv_cache"].sum() == pools["kv_cache"][1].numel()


def test_a_pool_starts_as_zeros_and_can_be_allocated_anew() -> None:
    model = nn.ModuleList([mla()])
    (builder,) = target_cache_builders(model, 4, torch.float32, CPU)
    for num_blocks in (2, 9):
        assert not builder.allocate_kv_cache_tensors(num_blocks)["kv_cache"].any()
        bind_kv_caches(model, [builder])
        cache = attention_layers(model)[0].kv_cache
        assert isinstance(cache, LatentCacheTensor)
        assert cache.latent.shape[0] == num_blocks


def test_builders_serve_only_their_own_modules() -> None:
    model = nn.ModuleList([mha()])
    (builder,) = target_cache_builders(model, 4, torch.float32, CPU)
    builder.allocate_kv_cache_tensors(1)
    assert builder.build_kv_cache_tensor(0, mha()) is None
    assert builder.build_kv_cache_tensor(1, model[0]) is None
    with pytest.raises(RuntimeError, match="attention layer 0"):
        bind_kv_caches(nn.ModuleList([mla()]), [builder])


def test_latents_of_different_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="equally wide"):
        target_cache_builders(nn.ModuleList([mla(), mla(rank=8)]), 4, torch.float32, CPU)


def test_a_model_without_attention_needs_no_cache() -> None:
    assert target_cache_builders(nn.Linear(1, 1), 4, torch.float32, CPU) == []
