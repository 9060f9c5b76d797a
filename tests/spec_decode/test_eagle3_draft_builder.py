"""The draft's KV cache: its size, its key, its place beside the target's, its heads per rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_bench import CPU, MHA, MLA, draft_tensors, load, write_draft

from atom.distributed.parallel_state import ParallelGroup
from atom.kv_cache.base import KVCacheBuilder
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_loader.source import ModelSource
from atom.model_ops.attention.cached_attention import CachedAttention
from atom.model_ops.attention.metadata import KVCacheTensor, LatentCacheTensor
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.platform import cpu_platform
from atom.spec_decode.eagle3_draft_builder import Eagle3DraftBuilder

Target = tuple[CausalLM, ModelSource]
BLOCK_SIZE, NUM_BLOCKS = 4, 6


@pytest.mark.parametrize(
    ("raw", "token_elements", "shape"),
    [
        ({**MHA, "num_key_value_heads": 2}, 2 * 2 * 8, (1, 2, NUM_BLOCKS, BLOCK_SIZE, 2, 8)),
        (MLA, 16 + 8, (1, NUM_BLOCKS, BLOCK_SIZE, 24)),
    ],
    ids=["mha", "mla"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_and_pool(
    raw: dict[str, Any],
    token_elements: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tmp_path: Path,
    llama_target: Target,
) -> None:
    draft = load(write_draft(tmp_path, raw, draft_tensors(raw)), *llama_target)
    builder = Eagle3DraftBuilder(draft, BLOCK_SIZE, dtype, CPU)
    assert builder.compute_block_bytes() == BLOCK_SIZE * token_elements * dtype.itemsize
    pools = builder.allocate_kv_cache_tensors(NUM_BLOCKS)
    assert list(pools) == ["eagle3_kv_cache"]
    pool = pools["eagle3_kv_cache"]
    assert (pool.shape, pool.dtype) == (shape, dtype)
    assert pool.nbytes == NUM_BLOCKS * builder.compute_block_bytes()
    assert not pool.any()


@pytest.mark.parametrize("raw", [MHA, MLA], ids=["mha draft", "mla draft"])
@pytest.mark.parametrize("kind", ["llama_target", "mla_target"])
def test_beside_a_target(
    raw: dict[str, Any], kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each layer gets a view of its own pool, whichever builder is asked first."""
    target, source = request.getfixturevalue(kind)
    draft = load(write_draft(tmp_path, raw, draft_tensors(raw)), target, source)
    builders: list[KVCacheBuilder] = [
        Eagle3DraftBuilder(draft, BLOCK_SIZE, torch.float32, CPU),
        PagedCache(attention_layers(target), BLOCK_SIZE, torch.float32, CPU),
    ]
    pools = [builder.allocate_kv_cache_tensors(NUM_BLOCKS) for builder in builders]
    assert [list(pool) for pool in pools] == [["eagle3_kv_cache"], ["kv_cache"]]
    bind_kv_caches(target, builders)
    bind_kv_caches(draft, builders)
    (ours,) = attention_layers(draft).values()
    draft_pool = pools[0]["eagle3_kv_cache"].untyped_storage().data_ptr()
    assert _storage(ours) == draft_pool
    assert ours.kv_cache.block_size == BLOCK_SIZE
    assert draft_pool not in {_storage(layer) for layer in attention_layers(target).values()}


def _storage(layer: CachedAttention) -> int:
    cache = layer.kv_cache
    assert isinstance(cache, (KVCacheTensor, LatentCacheTensor))
    tensor = cache.key if isinstance(cache, KVCacheTensor) else cache.latent
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("kv_heads", "size", "heads_of_ranks"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
        (4, 4, [[0], [1], [2], [3]]),
    ],
)
def test_kv_heads_over_ranks(
    kv_heads: int,
    size: int,
    heads_of_ranks: list[list[int]],
    tmp_path: Path,
    llama_target: Target,
) -> None:
    """Fewer heads than ranks are replicated; no rank is left without."""
    raw = {**MHA, "num_key_value_heads": kv_heads}
    tensors = draft_tensors(raw, embed=True)
    folder = write_draft(tmp_path, raw, tensors)
    whole = tensors["midlayer.self_attn.k_proj.weight"].view(kv_heads, 8, -1)
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    for rank, heads in enumerate(heads_of_ranks):
        group = ParallelGroup(rank, size)
        draft = load(folder, *llama_target, replace(context, group=group))
        builder = Eagle3DraftBuilder(draft, BLOCK_SIZE, torch.float32, CPU)
        assert builder.compute_block_bytes() == 2 * BLOCK_SIZE * len(heads) * 8 * 4
        (pool,) = builder.allocate_kv_cache_tensors(NUM_BLOCKS).values()
        assert pool.shape[-2:] == (len(heads), 8)
        qkv = draft.midlayer.self_attn.qkv_proj
        keys = qkv.weight.split(list(qkv.storage.rows))[1]
        assert torch.equal(keys.view(len(heads), 8, -1), whole[heads])


def test_a_latent_cache_is_whole_on_every_rank(tmp_path: Path, llama_target: Target) -> None:
    folder = write_draft(tmp_path, MLA, draft_tensors(MLA, embed=True))
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    sizes = set()
    for rank in range(4):
        draft = load(folder, *llama_target, replace(context, group=ParallelGroup(rank, 4)))
        builder = Eagle3DraftBuilder(draft, BLOCK_SIZE, torch.float32, CPU)
        sizes.add(builder.compute_block_bytes())
    assert sizes == {BLOCK_SIZE * 24 * 4}
