"""What a graph captures asks the device for nothing, and computes the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_ops.batches import Part, attention_metadata

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.kernels.torch.attention import (
    block_attention,
    kv_cache_write,
    paged_attention,
)
from atom.model_ops.kernels.torch.elementwise import silu_and_mul
from atom.model_ops.kernels.torch.mla import (
    absorb_limit,
    mla_attention,
    mla_cache_write,
)
from atom.model_ops.kernels.torch.moe import moe_experts, sum_experts_on_device

CPU = torch.device("cpu")


def metadata_of(*sequences: tuple[int, int, list[int]]) -> AttentionMetadata:
    """(tokens already cached, queries, blocks) of each sequence, in blocks of 4."""
    parts = [Part(queries, start, blocks) for start, queries, blocks in sequences]
    return attention_metadata(parts, 4, CPU)


BATCHES = {
    "one query": metadata_of((5, 1, [2, 0]), (0, 1, [3]), (11, 1, [1, 4, 5])),
    "three queries": metadata_of((5, 3, [2, 0]), (0, 3, [3]), (8, 3, [1, 4, 5])),
    "ragged": metadata_of((5, 3, [2, 0]), (0, 1, [3]), (8, 3, [1, 4, 5]), (0, 2, [6])),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bound", [12, 17])
class TestUnknownContexts:
    """`max_context_len` is exact, or reaches beyond every block table."""

    def unknown(self, batch: str, bound: int) -> AttentionMetadata:
        known = BATCHES[batch]
        tables = torch.nn.functional.pad(known.block_tables, (0, 5 - known.block_tables.shape[1]))
        return dataclasses.replace(
            known, block_tables=tables, max_context_len=bound, context_lens_cpu=None
        )

    @pytest.mark.parametrize("window", [None, 3])
    def test_paged_attention(self, batch: str, bound: int, window: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        key, value = torch.randn(2, 7, 4, 2, 8, generator=generator)
        q = torch.randn(BATCHES[batch].slot_mapping.shape[0], 4, 8, generator=generator)
        cache = KVCacheTensor(key, value)
        for op in (paged_attention, block_attention):
            expected = op(q, cache, BATCHES[batch], 0.3, window)
            out = op(q, cache, self.unknown(batch, bound), 0.3, window)
            torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)

    @pytest.mark.parametrize(("rank", "up_rows"), [(8, 12), (24, 4)], ids=["absorb", "expand"])
    def test_mla_attention(self, batch: str, bound: int, rank: int, up_rows: int) -> None:
        assert (absorb_limit(rank, up_rows) < 3) == (rank == 24)
        generator = torch.Generator().manual_seed(0)
        cache = LatentCacheTensor(torch.randn(7, 4, rank + 4, generator=generator))
        up_proj = torch.randn(3, up_rows, rank, generator=generator)
        width = up_rows // 2 + 4
        q = torch.randn(BATCHES[batch].slot_mapping.shape[0], 3, width, generator=generator)
        expected = mla_attention(q, cache, up_proj, BATCHES[batch], 0.3)
        out = mla_attention(q, cache, up_proj, self.unknown(batch, bound), 0.3)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_padding_rows_write_nothing() -> None:
    slots = torch.tensor([5, -1, 0, -1])
    rows = torch.arange(1.0, 5.0)[:, None, None].expand(4, 1, 2)
    pools = KVCacheTensor(torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 2))
    kv_cache_write(rows, -rows, pools, slots)
    latents = LatentCacheTensor(torch.zeros(2, 4, 3))
    mla_cache_write(rows[:, 0], rows[:, 0, :1], latents, slots)
    expected = torch.tensor([3.0, 0, 0, 0, 0, 1, 0, 0])[:, None, None]
    assert torch.equal(pools.key.flatten(0, 1), expected.expand(8, 1, 2))
    assert torch.equal(pools.value.flatten(0, 1), -expected.expand(8, 1, 2))
    assert torch.equal(latents.latent.flatten(0, 1), expected[:, 0].expand(8, 3))


@pytest.mark.gpu
def test_padding_rows_write_to_the_spare_block_on_a_gpu() -> None:
    slots = torch.tensor([5, -1, 0, -1], device="cuda")
    rows = torch.arange(1.0, 5.0, device="cuda")[:, None, None].expand(4, 1, 2)
    pools = KVCacheTensor(*torch.zeros(2, 3, 4, 1, 2, device="cuda"))  # the last block is spare
    kv_cache_write(rows, rows, pools, slots)
    assert pools.key[:2].flatten().tolist() == [3, 3, *[0] * 8, 1, 1, *[0] * 4]
    assert not pools.key[2, :3].any()


@pytest.mark.parametrize("num_experts", [4, 24], ids=["every expert", "copies"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_experts_on_the_device(num_experts: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 6, generator=generator)
    w13 = torch.randn(num_experts, 10, 6, generator=generator)
    w2 = torch.randn(num_experts, 6, 5, generator=generator)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator)
    expected = moe_experts(x, w13, w2, weights, ids)
    out = sum_experts_on_device(x, w13, w2, weights, ids, silu_and_mul)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    ids[0, 1], w13[0] = num_experts, float("nan")  # an expert elsewhere
    ids[ids == 0] = 1
    expected = moe_experts(x, w13, w2, weights, ids, 4)
    out = sum_experts_on_device(x, w13, w2, weights, ids, silu_and_mul)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
