"""Paged attention, prefill and cache writes against float64 attention over the same cache."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.triton.attention import prefill_attention as prefill_module
from atom.model_ops.kernels.triton.attention.cache_write import kv_cache_write
from atom.model_ops.kernels.triton.attention.flash import refuses
from atom.model_ops.kernels.triton.attention.paged_attention import attend as paged_attend
from atom.model_ops.kernels.triton.attention.paged_attention import num_splits, paged_attention
from atom.model_ops.kernels.triton.attention.prefill_attention import prefill_attention
from atom.model_ops.kernels.triton.support import refuses_storage
from atom.model_ops.registry import OpQuery
from atom.platform import Platform, current_platform

FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
Attend = Callable[
    [torch.Tensor, KVCacheTensor, AttentionMetadata, float, "int | None"], torch.Tensor
]
ONE_SPLIT: Attend = partial(paged_attend, 1)
BOTH = {"decode": ONE_SPLIT, "prefill": prefill_attention}


def skip_unless_converted(storage: torch.dtype) -> None:
    """The interpreter converts every type, a GPU those of its arch."""
    reason = refuses_storage(OpQuery(current_platform(), torch.bfloat16, {}, storage))
    if reason is not None:
        pytest.skip(reason)


def metadata_of(
    sequences: list[tuple[int, int]], block_size: int, num_blocks: int, device: torch.device
) -> AttentionMetadata:
    """(context, queries) of each sequence, in blocks of a shuffled pool."""
    blocks = list(range(num_blocks))
    random.Random(0).shuffle(blocks)
    counts = [-(-context // block_size) for context, _ in sequences]
    tables = torch.zeros(len(sequences), max(*counts, 1), dtype=torch.int32)
    slots: list[int] = []
    for row, count, (context, queries) in zip(tables, counts, sequences, strict=True):
        row[:count] = torch.tensor([blocks.pop() for _ in range(count)])
        for at in range(context - queries, context):
            slots.append(int(row[at // block_size]) * block_size + at % block_size)
    starts = [0, *accumulate(queries for _, queries in sequences)]
    return AttentionMetadata(
        slot_mapping=torch.tensor(slots, device=device),
        block_tables=tables.to(device),
        block_counts=torch.tensor(counts, dtype=torch.int32, device=device),
        context_lens=torch.tensor([c for c, _ in sequences], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        max_seqlen_q=max(queries for _, queries in sequences),
        max_context_len=max(context for context, _ in sequences),
        query_lens_cpu=tuple(queries for _, queries in sequences),
        context_lens_cpu=None,
    )


def random_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> KVCacheTensor:
    """[blocks, block_size, kv_heads, d]; 8-bit numbers with scales of their own."""
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, *shape, generator=generator)
    if dtype not in FP8.values():
        return KVCacheTensor(key.to(dtype).to(device), value.to(dtype).to(device))
    scales = torch.tensor([0.03]), torch.tensor([0.02])
    parts = [(x / s).to(dtype).to(device) for x, s in zip((key, value), scales, strict=True)]
    return KVCacheTensor(*parts, *(scale.to(device) for scale in scales))


def real_values(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    values = stored.cpu().float().double()
    return values if scale is None else values * scale.cpu().double()


def reference(
    q: torch.Tensor,
    cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> torch.Tensor:
    """The same in float64, sequence by sequence."""
    key = real_values(cache.key, cache.key_scale)
    value = real_values(cache.value, cache.value_scale)
    group = q.shape[1] // key.shape[2]
    results = []
    starts = metadata.cu_seqlens_q.tolist()
    for b, context in enumerate(metadata.context_lens.tolist()):
        rows = q[starts[b] : starts[b + 1]].cpu().double()
        table = metadata.block_tables[b].cpu().long()
        k, v = (
            x[table].flatten(0, 1)[:context].repeat_interleave(group, dim=1) for x in (key, value)
        )
        at = context - rows.shape[0] + torch.arange(rows.shape[0])[:, None]
        keys = torch.arange(context)
        hidden = (keys > at) if causal else (keys > context).expand(rows.shape[0], -1)
        if window is not None:
            hidden = hidden | (keys <= at - window)
        scores = torch.einsum("qhd,khd->hqk", rows, k) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).nan_to_num()
        results.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(results)


def check(
    attend: Attend,
    device: torch.device,
    sequences: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    window: int | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Attend over a random cache, compare with the reference, and return the result."""
    num_blocks = sum(-(-context // block_size) for context, _ in sequences) + 1
    metadata = metadata_of(sequences, block_size, num_blocks, device)
    shape = (num_blocks, block_size, heads[1], head_dim)
    cache = random_cache(shape, storage or dtype, device)
    num_tokens = sum(queries for _, queries in sequences)
    generator = torch.Generator().manual_seed(2)
    # As a view of a wider row, which is how a fused projection hands it over.
    wide = torch.randn(num_tokens, heads[0] + 1, head_dim, generator=generator).to(dtype)
    q = wide.to(device)[:, : heads[0]]
    scale = head_dim**-0.5
    out = attend(q, cache, metadata, scale, window)
    assert out.shape == q.shape
    assert out.dtype == dtype
    expected = reference(q, cache, metadata, scale, window, causal)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    return out


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=["mha", "group3", "group8"])
def test_ragged_batches(op: str, heads: tuple[int, int], device: torch.device) -> None:
    check(BOTH[op], device, [(1, 1), (67, 3), (16, 16), (33, 1)], heads=heads)


@pytest.mark.parametrize("units", [1, 256], ids=["whole", "split"])
@pytest.mark.parametrize("window", [None, 5, 300])
def test_queries_of_a_block_see_all_of_it(
    window: int | None, units: int, device: torch.device
) -> None:
    attend = partial(paged_attend, units, causal=False)
    sequences = [(8, 8), (67, 8), (600, 8)]
    check(attend, device, sequences, heads=(6, 2), window=window, causal=False)
    check(attend, device, sequences, dtype=torch.bfloat16, window=window, causal=False)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("head_dim", [8, 80, 96, 112, 128, 256])
def test_head_sizes(op: str, head_dim: int, device: torch.device) -> None:
    check(BOTH[op], device, [(21, 1), (37, 4)], heads=(2, 1), head_dim=head_dim)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("block_size", [4, 16, 32, 64, 128])
def test_block_sizes(op: str, block_size: int, device: torch.device) -> None:
    check(BOTH[op], device, [(block_size, 1), (block_size + 1, 2)], block_size=block_size)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("queries", range(1, 17))
def test_queries_of_a_verify_window(op: str, queries: int, device: torch.device) -> None:
    sequences = [(20 + queries, queries), (queries, queries)]
    check(BOTH[op], device, sequences, heads=(2, 1), head_dim=64)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("window", [1, 5, 40])
def test_sliding_windows(op: str, window: int, device: torch.device) -> None:
    check(BOTH[op], device, [(90, 3), (4, 4), (41, 1)], window=window)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(op: str, dtype: torch.dtype, device: torch.device) -> None:
    check(BOTH[op], device, [(70, 3), (16, 2)], dtype=dtype, head_dim=128)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_caches(op: str, name: str, dtype: torch.dtype, device: torch.device) -> None:
    skip_unless_converted(FP8[name])
    check(BOTH[op], device, [(70, 3), (16, 2)], dtype=dtype, storage=FP8[name])


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
)
def test_caches_of_another_wide_type(
    op: str, dtype: torch.dtype, storage: torch.dtype, device: torch.device
) -> None:
    check(BOTH[op], device, [(21, 3)], dtype=dtype, storage=storage)


class TestSplits:
    @pytest.mark.parametrize("units", [1, 3, 4, 40])
    @pytest.mark.parametrize("window", [None, 300])
    def test_any_number(self, units: int, window: int | None, device: torch.device) -> None:
        attend = partial(paged_attend, units)
        sequences = [(1100, 2), (5, 2), (257, 1)]
        check(attend, device, sequences, heads=(2, 1), block_size=64, window=window)

    def test_more_than_one_reduction_step(self, device: torch.device) -> None:
        attend = partial(paged_attend, 1000)
        check(attend, device, [(256 * 19, 1)], heads=(1, 1), head_dim=80, block_size=128)

    def test_of_bfloat16(self, device: torch.device) -> None:
        attend = partial(paged_attend, 1000)
        check(attend, device, [(600, 3), (3, 3)], dtype=torch.bfloat16, block_size=64)

    def test_chosen_from_shapes(self) -> None:
        assert num_splits(8, 1 << 20, 1216) == 122
        assert num_splits(8, 8192, 1216) == 32
        assert num_splits(512, 8192, 1216) == 2
        assert num_splits(2048, 8192, 1216) == 1
        assert num_splits(700, 8192, 608) == 3  # two leave a quarter of three rounds idle
        assert num_splits(1, 511, 1216) == 1
        few_tiles = prefill_module.num_splits
        assert few_tiles(4, 131072, 304) == 32
        assert few_tiles(64, 131072, 304) == 4
        assert few_tiles(4, 4096, 304) == 4
        assert few_tiles(304, 131072, 304) == few_tiles(1, 2047, 304) == 1

    @pytest.mark.parametrize(
        ("dtype", "window"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, 150)]
    )
    def test_of_prefill(
        self,
        dtype: torch.dtype,
        window: int | None,
        device: torch.device,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Some splits end before a tile's first query, some within it, some are empty."""
        monkeypatch.setattr(prefill_module, "_SHORTEST_SPLIT", 64)
        attend = partial(prefill_module.attend, 40)
        sequences = [(200, 20), (0, 0), (66, 66)]
        check(attend, device, sequences, heads=(2, 1), dtype=dtype, block_size=64, window=window)

    def test_the_op_knows_the_device(self, device: torch.device) -> None:
        check(paged_attention, device, [(520, 1)], heads=(1, 1), block_size=64)


class TestPadding:
    """Rows that no sequence owns, as a graph's buckets have them."""

    @pytest.mark.parametrize("op", [*BOTH, "split"])
    def test_contexts_shorter_than_their_queries(self, op: str, device: torch.device) -> None:
        attend = BOTH.get(op, partial(paged_attend, 1000))
        metadata = metadata_of([(600, 2), (2, 2), (2, 2), (2, 2)], 64, 16, device)
        metadata.context_lens[1:] = torch.tensor([0, 1, 2])
        metadata.block_tables[1:] = 0
        metadata = dataclasses.replace(metadata, max_context_len=1024)
        cache = random_cache((16, 64, 1, 64), torch.float32, device)
        q = torch.randn(8, 2, 64).to(device)
        out = attend(q, cache, metadata, 0.125, None)
        expected = reference(q[6:], cache, metadata_slice(metadata, 3), 0.125, None)
        torch.testing.assert_close(out[6:].cpu().double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(out[2:5], torch.zeros_like(out[2:5]))
        assert bool(out.isfinite().all())

    @pytest.mark.parametrize("op", [*BOTH, "split"])
    def test_sequences_without_queries(self, op: str, device: torch.device) -> None:
        attend = BOTH.get(op, partial(paged_attend, 1000))
        check(attend, device, [(0, 0), (520, 1), (7, 0), (3, 2), (0, 0)], block_size=64)

    @pytest.mark.parametrize("op", BOTH)
    def test_nothing_beyond_a_context_is_read(self, op: str, device: torch.device) -> None:
        metadata = metadata_of([(21, 2)], 16, 3, device)
        cache = random_cache((3, 16, 1, 64), torch.float32, device)
        q = torch.randn(2, 1, 64).to(device)
        clean = BOTH[op](q, cache, metadata, 0.1, None)
        for pool in (cache.key, cache.value):
            block = pool[metadata.block_tables[0, 1].item()]
            block[5:] = float("nan")
        assert torch.equal(BOTH[op](q, cache, metadata, 0.1, None), clean)

    def test_a_windowed_context_is_not_read_before_its_window(self, device: torch.device) -> None:
        metadata = metadata_of([(600, 1)], 64, 16, device)
        cache = random_cache((16, 64, 1, 64), torch.float32, device)
        q = torch.randn(1, 1, 64).to(device)
        for attend in (*BOTH.values(), partial(paged_attend, 1000)):
            clean = attend(q, cache, metadata, 0.1, 300)
            gone = dataclasses.replace(metadata, block_tables=metadata.block_tables.clone())
            gone.block_tables[0, :4] = -(1 << 30)  # 300 tokens back lies in block 4
            assert torch.equal(attend(q, cache, gone, 0.1, 300), clean)


def metadata_slice(metadata: AttentionMetadata, b: int) -> AttentionMetadata:
    """Sequence b alone."""
    starts = metadata.cu_seqlens_q[b : b + 2]
    return dataclasses.replace(
        metadata,
        block_tables=metadata.block_tables[b : b + 1],
        context_lens=metadata.context_lens[b : b + 1],
        cu_seqlens_q=starts - starts[0],
    )


@given(data=st.data())
@settings(max_examples=12)
def test_mixed_batches_of_any_lengths(data: st.DataObject, device: torch.device) -> None:
    group = data.draw(st.sampled_from([1, 3, 4]))
    lengths = st.tuples(st.integers(1, 40), st.integers(0, 50))
    drawn = data.draw(st.lists(lengths, min_size=1, max_size=4))
    sequences = [(queries + cached, queries) for queries, cached in drawn]
    window = data.draw(st.sampled_from([None, 17]))
    op = data.draw(st.sampled_from(list(BOTH)))
    check(BOTH[op], device, sequences, heads=(group, 1), head_dim=16, window=window)


class TestFarBlocks:
    """Offsets beyond 2^31 elements, in a pool whose pages nobody else touches."""

    BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 131_200, 16, 8, 128

    @pytest.fixture
    def pool(self, device: torch.device) -> torch.Tensor:
        shape = (self.BLOCKS, self.BLOCK_SIZE, self.KV_HEADS, self.HEAD_DIM)
        numbers = self.BLOCKS * self.BLOCK_SIZE * self.KV_HEADS * self.HEAD_DIM
        assert numbers > 2**31
        if device.type != "cpu":
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)
        return torch.from_numpy(np.zeros(2 * numbers, np.uint8)).view(torch.bfloat16).view(shape)

    @pytest.mark.parametrize("op", BOTH)
    def test_are_written_and_read(self, op: str, pool: torch.Tensor, device: torch.device) -> None:
        near = metadata_of([(20, 20)], self.BLOCK_SIZE, 2, device)
        far = dataclasses.replace(
            near,
            block_tables=torch.tensor(
                [[self.BLOCKS - 1, 65_537]], dtype=torch.int32, device=device
            ),
            slot_mapping=torch.tensor(
                [(self.BLOCKS - 1) * 16 + i for i in range(16)]
                + [65_537 * 16 + i for i in range(4)],
                device=device,
            ),
        )
        generator = torch.Generator().manual_seed(3)
        q, k, v = torch.randn(3, 20, 8, 128, generator=generator).bfloat16().to(device)
        # Keys and values in one pool: the values are written last, and read as both.
        kv_cache_write(k, v, KVCacheTensor(pool, pool), far.slot_mapping)
        assert torch.equal(pool[self.BLOCKS - 1], v[:16])
        assert torch.equal(pool[65_537, :4], v[16:])
        out = BOTH[op](q, KVCacheTensor(pool, pool), far, 0.1, None)
        small = torch.zeros(2, 16, 8, 128, dtype=torch.bfloat16, device=device)
        small.flatten(0, 1)[near.slot_mapping] = v
        expected = reference(q, KVCacheTensor(small, small), near, 0.1, None)
        torch.testing.assert_close(out.cpu().double(), expected, atol=1.5e-2, rtol=1.5e-2)


class TestCacheWrite:
    def cache(self, dtype: torch.dtype, device: torch.device) -> KVCacheTensor:
        """Two blocks of 4 tokens, 3 heads of 5 numbers, in the middle of a larger pool."""
        key, value = (torch.full((4, 4, 3, 5), 7.0).to(dtype).to(device)[1:3] for _ in range(2))
        return KVCacheTensor(key, value)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_exactly_the_slots_are_written(self, dtype: torch.dtype, device: torch.device) -> None:
        cache = self.cache(dtype, device)
        wide = torch.randn(4, 7, 5).to(dtype).to(device)
        k, v = wide[:, :3], wide[:, 4:]
        slots = torch.tensor([7, -1, 0, 5], device=device)
        kv_cache_write(k, v, cache, slots)
        for pool, rows in ((cache.key, k), (cache.value, v)):
            expected = torch.full((8, 3, 5), 7.0).to(dtype).to(device)
            expected[[7, 0, 5]] = rows[[0, 2, 3]]
            assert torch.equal(pool.flatten(0, 1), expected)
            whole = pool._base
            assert whole is not None
            assert bool((whole[0] == 7).all())
            assert bool((whole[3] == 7).all())

    def test_more_numbers_than_a_tile(self, device: torch.device) -> None:
        key, value = torch.zeros(2, 2, 4, 9, 130).to(device)
        k, v = torch.randn(2, 2, 9, 130).to(device)
        kv_cache_write(k, v, KVCacheTensor(key, value), torch.tensor([6, 1], device=device))
        assert torch.equal(key.flatten(0, 1)[[6, 1]], k)
        assert torch.equal(value.flatten(0, 1)[[6, 1]], v)
        assert int(key.count_nonzero()) == k.numel()

    @pytest.mark.parametrize("name", FP8)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_fp8(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        fp8 = FP8[name]
        skip_unless_converted(fp8)
        largest = torch.finfo(fp8).max
        key, value = (torch.zeros(2, 4, 1, 64).to(fp8).to(device) for _ in range(2))
        scales = torch.tensor([0.5]).to(device), torch.tensor([0.3]).to(device)
        k, v = ((torch.randn(2, 1, 64) * size).to(dtype) for size in (20, 40))
        k[0, 0, :3] = torch.tensor([1e6, -1e6, float("nan")])
        cache = KVCacheTensor(key, value, *scales)
        slots = torch.tensor([6, -1], device=device)
        kv_cache_write(k.to(device), v.to(device), cache, slots)
        for stored, rows, scale in ((key, k, scales[0]), (value, v, scales[1])):
            expected = (rows[0].float() / scale.cpu()).clamp(-largest, largest).to(fp8).float()
            written = stored.cpu().float().flatten(0, 1)
            torch.testing.assert_close(written[6], expected, equal_nan=True, atol=0, rtol=0)
            written[6] = 0
            assert not written.any()
        assert key.cpu().float()[1, 2, 0, 0].item() == largest

    def test_no_tokens(self, device: torch.device) -> None:
        empty = torch.zeros(0, 3, 5, device=device)
        slots = torch.zeros(0, dtype=torch.int64, device=device)
        kv_cache_write(empty, empty, self.cache(torch.float32, device), slots)

    def test_a_mismatch_is_named(self, device: torch.device) -> None:
        rows = torch.zeros(2, 3, 4, device=device)
        slots = torch.zeros(2, dtype=torch.int64, device=device)
        with pytest.raises(ValueError, match=r"k torch.float32 \[2, 3, 4\]"):
            kv_cache_write(rows, rows, self.cache(torch.float32, device), slots)


@pytest.mark.parametrize("op", BOTH)
def test_a_mismatch_is_named(op: str, device: torch.device) -> None:
    metadata = metadata_of([(3, 1)], 16, 1, device)
    cache = random_cache((1, 16, 2, 64), torch.float32, device)
    with pytest.raises(ValueError, match=r"q torch.float32 \[1, 3, 64\]"):
        BOTH[op](torch.zeros(1, 3, 64, device=device), cache, metadata, 0.1, None)


class TestRefusals:
    @staticmethod
    def reason(platform: Platform, storage: torch.dtype, head_dim: int = 128) -> str | None:
        return refuses(OpQuery(platform, torch.bfloat16, {"head_dim": head_dim}, storage))

    def test_head_size(self) -> None:
        platform = Platform("rocm", "gfx942", True)
        assert self.reason(platform, torch.bfloat16, 256) is None
        assert self.reason(platform, torch.bfloat16, 257) == "head_dim=257 is larger than 256"

    @pytest.mark.parametrize(
        ("kind", "arch", "converted"),
        [
            ("rocm", "gfx942", {"e4m3fn", "e4m3fnuz"}),
            ("rocm", "gfx950", {"e4m3fn", "e4m3fnuz"}),
            ("cuda", "sm90", {"e4m3fn"}),
            ("cuda", "sm120", {"e4m3fn"}),
            ("cuda", "sm80", set()),
            ("cpu", "avx512", {"e4m3fn", "e4m3fnuz"}),
        ],
    )
    def test_eight_bit_types(self, kind: str, arch: str, converted: set[str]) -> None:
        platform = Platform(kind, arch, True)
        for name, storage in FP8.items():
            expected = None if name in converted else f"{arch} does not convert {storage}"
            assert self.reason(platform, storage) == expected

    def test_another_type(self) -> None:
        platform = Platform("cuda", "sm90", True)
        assert self.reason(platform, torch.int8) == "no kernel for a cache of torch.int8"
