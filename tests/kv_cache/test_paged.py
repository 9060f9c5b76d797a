"""One cache for whatever attention layers store: its pools, its sizes, its views."""

from __future__ import annotations

import itertools
import mmap
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from model_ops.batches import Part, attention_metadata
from torch import nn
from transformers import LlamaConfig

from atom.kv_cache import paged
from atom.kv_cache.base import KVCacheMemoryError
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_ops.attention.cached_attention import CachedAttention, StoredPart
from atom.model_ops.attention.metadata import CacheTensor, KVCacheTensor, LatentCacheTensor
from atom.model_ops.attention.mha import Attention
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.platform import cpu_platform

CPU = torch.device("cpu")
CONTEXT = LayerContext.create(torch.float32, 8, cpu_platform())


def mha(kv_heads: int = 2, head_dim: int = 8) -> Attention:
    return Attention(4, kv_heads, head_dim, 1.0, CONTEXT)


def mla(rank: int = 16) -> MLAAttention:
    return MLAAttention(4, rank, 4, 8, 1.0, CONTEXT)


def cache_of(
    model: nn.Module, block_size: int = 4, dtype: torch.dtype = torch.float32
) -> PagedCache:
    return PagedCache(attention_layers(model), block_size, dtype, CPU)


def shapes(pools: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(pool.shape) for key, pool in pools.items()}


def test_keys_and_values() -> None:
    model = nn.ModuleList([mha(), nn.Linear(1, 1), mha()])
    cache = cache_of(model, 16, torch.bfloat16)
    assert cache.compute_block_bytes() == 2 * 2 * 16 * 2 * 8 * 2
    pools = cache.allocate_kv_cache_tensors(5)
    assert shapes(pools) == {"kv_cache": (2, 2, 5, 16, 2, 8)}
    assert pools["kv_cache"].nbytes == 5 * cache.compute_block_bytes()
    assert pools["kv_cache"].dtype == torch.bfloat16
    bind_kv_caches(model, [cache])
    last = attention_layers(model)[1].kv_cache
    assert isinstance(last, KVCacheTensor)
    assert last.block_size == 16
    last.value.fill_(1)
    assert pools["kv_cache"].sum() == pools["kv_cache"][1, 1].numel()


def test_latents() -> None:
    model = nn.ModuleList([mla(), mla(), mla()])
    cache = cache_of(model)
    assert cache.compute_block_bytes() == 3 * 4 * (16 + 4) * 4
    pools = cache.allocate_kv_cache_tensors(7)
    assert shapes(pools) == {"kv_cache": (3, 7, 4, 20)}
    assert pools["kv_cache"].nbytes == 7 * cache.compute_block_bytes()
    bind_kv_caches(model, [cache])
    middle = attention_layers(model)[1].kv_cache
    assert isinstance(middle, LatentCacheTensor)
    assert middle.block_size == 4
    middle.latent.fill_(1)
    assert pools["kv_cache"].sum() == pools["kv_cache"][1].numel()


def test_a_pool_starts_as_zeros_and_can_be_allocated_anew() -> None:
    model = nn.ModuleList([mla()])
    cache = cache_of(model)
    for num_blocks in (2, 9):
        assert not cache.allocate_kv_cache_tensors(num_blocks)["kv_cache"].any()
        bind_kv_caches(model, [cache])
        view = attention_layers(model)[0].kv_cache
        assert isinstance(view, LatentCacheTensor)
        assert view.latent.shape[0] == num_blocks


def test_a_block_of_all_layers_is_contiguous_on_a_cpu() -> None:
    """So memory in use grows by whole blocks, from the pool's beginning."""
    model = nn.ModuleList([mha(), mha(), mha()])
    cache = cache_of(model)
    pool = cache.allocate_kv_cache_tensors(5)["kv_cache"]
    bind_kv_caches(model, [cache])
    for layer in attention_layers(model).values():
        assert isinstance(layer.kv_cache, KVCacheTensor)
        layer.kv_cache.key[0] = layer.kv_cache.value[0] = 1
    written = pool.new_empty(0).set_(pool.untyped_storage()) != 0
    assert int(written.sum()) * 4 == cache.compute_block_bytes()
    assert bool(written[: int(written.sum())].all())


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no system with huge pages"
)
def test_huge_pages_are_asked_for() -> None:
    pool = paged.zeroed_pool((3 << 20,), torch.bfloat16, CPU, in_order=True)
    pages = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for entry, flags in itertools.pairwise(pages):
        header = next(line for line in entry.splitlines()[::-1] if "-" in line.split(" ")[0])
        begin, end = (int(part, 16) for part in header.split(" ")[0].split("-"))
        if begin <= pool.data_ptr() < end:
            assert "hg" in flags.splitlines()[0].split()
            return
    pytest.fail("the pool is in no map")


@pytest.mark.skipif(sys.platform != "linux", reason="no other system is asked for huge pages")
def test_a_system_may_have_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Refusing(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            asked.append(option)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(paged.mmap, "mmap", Refusing)
    pool = paged.zeroed_pool((3 << 20,), torch.bfloat16, CPU, in_order=True)
    assert asked == [mmap.MADV_HUGEPAGE]
    assert not pool.any()
    pool.fill_(1)
    assert bool((pool == 1).all())


@pytest.mark.skipif(sys.platform != "linux", reason="others may promise any memory")
@pytest.mark.parametrize("in_order", [False, True])
def test_memory_that_is_refused_is_named(in_order: bool) -> None:
    """Half of all addresses: no system has them to give."""
    with pytest.raises(KVCacheMemoryError, match=r"have 67108864.0 GiB more.*; lower --kv-cache"):
        paged.zeroed_pool((1 << 55,), torch.bfloat16, CPU, in_order=in_order)


def test_a_cache_serves_only_its_own_modules() -> None:
    model = nn.ModuleList([mha()])
    cache = cache_of(model)
    cache.allocate_kv_cache_tensors(1)
    assert cache.build_kv_cache_tensor(0, mha()) is None
    assert cache.build_kv_cache_tensor(1, model[0]) is None
    with pytest.raises(RuntimeError, match="attention layer 0"):
        bind_kv_caches(nn.ModuleList([mla()]), [cache])


def test_every_shape_has_a_pool_of_its_own() -> None:
    model = nn.ModuleList([mha(), mha(4), mla(), mha(2, 16), mha(), mla(8), mla()])
    cache = cache_of(model)
    pools = cache.allocate_kv_cache_tensors(3)
    assert shapes(pools) == {
        "kv_cache": (2, 2, 3, 4, 2, 8),
        "kv_cache_2": (1, 2, 3, 4, 4, 8),
        "kv_cache_3": (2, 3, 4, 20),
        "kv_cache_4": (1, 2, 3, 4, 2, 16),
        "kv_cache_5": (1, 3, 4, 12),
    }
    assert sum(pool.nbytes for pool in pools.values()) == 3 * cache.compute_block_bytes()
    bind_kv_caches(model, [cache])
    starts = set()
    for layer in attention_layers(model).values():
        view = layer.kv_cache
        if isinstance(layer, Attention):
            assert isinstance(view, KVCacheTensor)
            assert view.key.shape == view.value.shape == (3, 4, layer.num_kv_heads, layer.head_dim)
            starts |= {view.key.data_ptr(), view.value.data_ptr()}
        else:
            assert isinstance(layer, MLAAttention)
            assert isinstance(view, LatentCacheTensor)
            assert view.latent.shape == (3, 4, layer.kv_lora_rank + layer.qk_rope_head_dim)
            starts.add(view.latent.data_ptr())
    assert len(starts) == 4 * 2 + 3


def test_layers_of_different_shapes_attend_as_if_alone() -> None:
    """All write and read the same block ids; none disturbs another."""
    model = nn.ModuleList([mha(2, 8), mha(4, 8), mha(1, 16), mha(2, 8)])
    generator = torch.Generator().manual_seed(0)
    metadata = attention_metadata([Part(7, 0, [2, 0])], 4, CPU)

    def attend(layer: CachedAttention, rows: list[torch.Tensor]) -> torch.Tensor:
        rotary = RotaryEmbedding(LlamaConfig(), rows[0].shape[2], CONTEXT)
        out: torch.Tensor = layer(*rows, AttentionInputs(torch.arange(7), metadata, rotary))
        return out

    inputs = [
        [
            torch.randn(7, heads, layer.head_dim, generator=generator)
            for heads in (4, layer.num_kv_heads, layer.num_kv_heads)
        ]
        for layer in model
        if isinstance(layer, Attention)
    ]
    alone = []
    for layer, rows in zip(model, inputs, strict=True):
        one = nn.ModuleList([layer])
        cache = cache_of(one)
        cache.allocate_kv_cache_tensors(3)
        bind_kv_caches(one, [cache])
        alone.append(attend(layer, rows))
    cache = cache_of(model)
    cache.allocate_kv_cache_tensors(3)
    bind_kv_caches(model, [cache])
    for _ in range(2):  # the second time over what all have written
        together = [attend(layer, rows) for layer, rows in zip(model, inputs, strict=True)]
    for ours, expected in zip(together, alone, strict=True):
        assert torch.equal(ours, expected)


def test_scales_lie_beside_their_pools() -> None:
    model = nn.ModuleList([mha(), mla(), mha(4), mha()])
    for i, layer in enumerate(attention_layers(model).values()):
        assert isinstance(layer, Attention | MLAAttention)
        layer.kv_scale.given[0], layer.kv_scale.given[1] = 1 + i, 10 + i
    cache = cache_of(model, dtype=torch.float8_e4m3fn)
    tensors = cache.allocate_kv_cache_tensors(2)
    assert list(tensors) == [
        *("kv_cache", "kv_scale", "kv_cache_2", "kv_scale_2", "kv_cache_3", "kv_scale_3")
    ]
    assert tensors["kv_scale"].tolist() == [[1, 10], [4, 13]]
    assert tensors["kv_scale_2"].tolist() == [11]
    assert tensors["kv_scale_3"].tolist() == [[3, 12]]
    bind_kv_caches(model, [cache])
    last = attention_layers(model)[3].kv_cache
    assert isinstance(last, KVCacheTensor)
    assert last.key_scale is not None
    assert last.value_scale is not None
    assert (last.key_scale.tolist(), last.value_scale.tolist()) == ([4], [13])


class _IndexedAttention(CachedAttention):
    """A kind of attention that the cache has never heard of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def stored_parts(self) -> Mapping[str, tuple[int, ...]]:
        return {"latent": (self.width,), "index": (2, 3)}

    def stored_scales(self, storage: torch.dtype) -> torch.Tensor:
        return torch.tensor([2.0, 3.0])

    def view_cache(self, parts: Mapping[str, StoredPart]) -> CacheTensor:
        self.parts = parts
        return LatentCacheTensor(parts["latent"].tensor, parts["latent"].scale)

    def bind_kv_cache(self, cache: CacheTensor) -> None:
        self.kv_cache = cache


def test_a_new_kind_of_attention_says_what_it_stores() -> None:
    model = nn.ModuleList([_IndexedAttention(5), _IndexedAttention(7)])
    cache = cache_of(model, dtype=torch.float8_e4m3fn)
    tensors = cache.allocate_kv_cache_tensors(6)
    assert shapes(tensors) == {
        "kv_cache": (1, 6, 4, 5),
        "kv_scale": (1,),
        "kv_cache_2": (2, 6, 4, 2, 3),
        "kv_scale_2": (2,),
        "kv_cache_3": (1, 6, 4, 7),
        "kv_scale_3": (1,),
    }
    assert cache.compute_block_bytes() == 4 * (5 + 6 + 7 + 6)
    bind_kv_caches(model, [cache])
    last = model[1]
    assert isinstance(last, _IndexedAttention)
    index = last.parts["index"]
    assert index.scale is not None
    assert index.scale.tolist() == [3]
    assert index.tensor.data_ptr() == tensors["kv_cache_2"][1].data_ptr()
    assert last.kv_cache.block_size == 4


def test_a_prefix_tells_caches_apart() -> None:
    layers = attention_layers(nn.ModuleList([mha(), mla()]))
    cache = PagedCache(layers, 4, torch.float8_e4m3fn, CPU, prefix="draft_")
    assert list(cache.allocate_kv_cache_tensors(1)) == [
        *("draft_kv_cache", "draft_kv_scale", "draft_kv_cache_2", "draft_kv_scale_2")
    ]


def test_a_spare_block_where_the_host_must_not_wait() -> None:
    """On a CPU there is none; elsewhere there is one behind those that sequences own."""
    layers = attention_layers(nn.ModuleList([mha(), mla()]))
    cache = PagedCache(layers, 4, torch.float32, torch.device("meta"))
    assert shapes(cache.allocate_kv_cache_tensors(3)) == {
        "kv_cache": (1, 2, 4, 4, 2, 8),
        "kv_cache_2": (1, 4, 4, 20),
    }


def test_a_model_without_attention_needs_no_cache() -> None:
    cache = cache_of(nn.Linear(1, 1))
    assert (cache.compute_block_bytes(), cache.allocate_kv_cache_tensors(3)) == (0, {})
