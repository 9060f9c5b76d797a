"""The Triton kernels of latent attention against its definition in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_ops.batches import Part, attention_metadata

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.torch import mla as torch_mla
from atom.model_ops.kernels.triton.attention.prefill_attention import num_splits as prefill_splits
from atom.model_ops.kernels.triton.mla import invariant_mla
from atom.model_ops.kernels.triton.mla import mla_decode as decode_module
from atom.model_ops.kernels.triton.mla import mla_prefill as prefill_module
from atom.model_ops.kernels.triton.mla.mla_cache_write import mla_cache_write
from atom.model_ops.kernels.triton.mla.mla_decode import decode_tiles, mla_decode, num_splits
from atom.model_ops.kernels.triton.mla.mla_prefill import mla_prefill, plan_rounds
from atom.model_ops.kernels.triton.splits import fewest_that_fill
from atom.model_ops.registry import OpQuery
from atom.model_ops.upload import upload
from atom.platform import Platform

FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
SCALE = 0.2
# Of the largest output, by the type that is computed in.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}

Attend = Callable[..., torch.Tensor]
SLOW = pytest.mark.slow


@dataclass(frozen=True)
class Sizes:
    """Widths of one attention layer. With these, more than 14 queries are worth expanding."""

    heads: int = 3
    rank: int = 32
    nope: int = 8
    rope: int = 8
    v: int = 12
    block_size: int = 4


TINY = Sizes()
RAGGED = Sizes(heads=5, rank=48, nope=24, rope=4, v=20, block_size=32)
KIMI_TP8 = Sizes(heads=8, rank=512, nope=128, rope=64, v=128, block_size=16)


@dataclass
class Batch:
    """Random contexts in scattered blocks; the last tokens of each are the queries."""

    metadata: AttentionMetadata
    cache: LatentCacheTensor
    contexts: list[torch.Tensor]
    q: torch.Tensor
    up_proj: torch.Tensor


def make_batch(
    lengths: list[tuple[int, int]],
    device: torch.device,
    sizes: Sizes = TINY,
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    blocks: list[int] | None = None,
) -> Batch:
    """lengths: (context, queries) of each sequence. What no sequence owns is not a number.

    blocks: ids in the order of use; the pool reaches to the largest.
    """
    generator = torch.Generator().manual_seed(len(lengths))
    counts = [-(-context // sizes.block_size) for context, _ in lengths]
    ids = blocks or torch.randperm(sum(counts) + 3, generator=generator).tolist()
    shape, stored = (sizes.block_size, sizes.rank + sizes.rope), storage or dtype
    pool = torch.empty(max(ids) + 1, *shape, dtype=stored, device=device)
    scale = None if storage is None else torch.tensor([0.037])
    sequences, contexts = [], []
    for (context, queries), count in zip(lengths, counts, strict=True):
        own, ids = ids[:count], ids[count:]
        tokens = torch.full((count, *shape), float("nan"))
        tokens.view(-1, shape[1])[:context] = torch.randn(context, shape[1], generator=generator)
        kept = (tokens if scale is None else tokens / scale).to(stored)
        for block, content in zip(own, kept.to(device), strict=True):
            pool[block].copy_(content)
        real = kept.double().view(-1, shape[1])[:context]
        contexts.append(real if scale is None else real * scale.double())
        sequences.append(Part(queries, context - queries, own))
    num_tokens = sum(queries for _, queries in lengths)
    q = torch.randn(num_tokens, sizes.heads, sizes.nope + sizes.rope, generator=generator)
    up_proj = torch.randn(sizes.heads, sizes.nope + sizes.v, sizes.rank, generator=generator)
    return Batch(
        attention_metadata(sequences, sizes.block_size, device),
        LatentCacheTensor(pool, None if scale is None else scale.to(device)),
        contexts,
        q.to(device, dtype),
        (up_proj / sizes.rank**0.5).to(device, dtype),
    )


def by_definition(batch: Batch, causal: bool = True) -> torch.Tensor:
    """[T, heads, v] in float64; every head's keys and values are built."""
    q, up = batch.q.cpu().double(), batch.up_proj.cpu().double()
    heads, rank = up.shape[0], up.shape[2]
    nope = q.shape[2] - (batch.contexts[0].shape[1] - rank)
    out = []
    lens = batch.metadata.query_lens_cpu
    for context, rows in zip(batch.contexts, q.split(lens), strict=True):
        keys = torch.einsum("cr,hnr->hcn", context[:, :rank], up[:, :nope])
        keys = torch.cat((keys, context[:, rank:].expand(heads, -1, -1)), dim=-1)
        values = torch.einsum("cr,hvr->hcv", context[:, :rank], up[:, nope:])
        scores = torch.einsum("lhd,hcd->lhc", rows, keys) * SCALE
        seen = torch.ones(len(rows), len(context)).tril(len(context) - len(rows)).bool()
        if causal:
            scores.masked_fill_(~seen[:, None], float("-inf"))
        out.append(torch.einsum("lhc,hcv->lhv", scores.softmax(dim=-1), values))
    return torch.cat(out)


def run(attend: Attend, batch: Batch, **changes: object) -> torch.Tensor:
    metadata = dataclasses.replace(batch.metadata, **changes)
    return attend(batch.q, batch.cache, batch.up_proj, metadata, SCALE)


def check(attend: Attend, batch: Batch, causal: bool = True, **changes: object) -> None:
    out = run(attend, batch, **changes)
    expected = by_definition(batch, causal)
    assert out.dtype is batch.q.dtype
    assert out.is_contiguous()
    error = (out.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[batch.q.dtype]


def needs(storage: torch.dtype | None, device: torch.device) -> None:
    if storage is torch.float8_e4m3fnuz and device.type != "cpu":
        pytest.skip("which fp8 types a GPU converts depends on its arch")


STORED = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.bfloat16, "e4m3fn"),
    (torch.bfloat16, "e4m3fnuz"),
    (torch.float32, "e4m3fn"),
]


class TestDecode:
    @pytest.mark.parametrize(("dtype", "fp8"), STORED)
    def test_every_type(self, dtype: torch.dtype, fp8: str | None, device: torch.device) -> None:
        storage = FP8.get(fp8 or "")
        needs(storage, device)
        check(mla_decode, make_batch([(37, 1), (3, 3)], device, TINY, dtype, storage))

    def test_widths_and_blocks_of_other_sizes(self, device: torch.device) -> None:
        check(mla_decode, make_batch([(70, 3), (32, 1)], device, RAGGED, torch.bfloat16))
        check(mla_decode, make_batch([(40, 2)], device, dataclasses.replace(RAGGED, block_size=16)))

    def test_eight_heads_of_a_rank(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decode_module, "num_splits", lambda *_: 1)
        check(mla_decode, make_batch([(45, 1), (33, 2)], device, KIMI_TP8, torch.bfloat16))

    def test_more_rows_than_a_tile_holds(self, device: torch.device) -> None:
        sizes = dataclasses.replace(TINY, heads=9)
        check(mla_decode, make_batch([(20, 16), (30, 5), (16, 16)], device, sizes, torch.bfloat16))
        check(mla_decode, make_batch([(18, 4), (5, 5)], device, sizes))

    @pytest.mark.parametrize("splits", [1, 2, 4, 16, 32])
    def test_any_number_of_splits(
        self, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also more than there are keys for, and more than are joined at once."""
        monkeypatch.setattr(decode_module, "num_splits", lambda *_: splits)
        monkeypatch.setattr(decode_module, "_LEAST_KEYS", 16)
        contexts = [(300, 2), (17, 2)] if splits == 32 else [(100, 2), (17, 2)]
        check(mla_decode, make_batch(contexts, device))

    @pytest.mark.parametrize("splits", [1, 3])
    def test_a_block_whose_queries_see_each_other(
        self, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other kernel as well, whose splits are always the same."""
        monkeypatch.setattr(decode_module, "num_splits", lambda *_: splits)
        monkeypatch.setattr(decode_module, "_LEAST_KEYS", 16)
        sizes = dataclasses.replace(TINY, heads=9)
        batch = make_batch([(60, 8), (8, 8), (23, 2)], device, sizes)
        check(decode_module.mla_block_attention, batch, causal=False)
        check(invariant_mla.mla_block_attention, batch, causal=False)
        check(torch_mla.mla_block_attention, batch, causal=False)

    def test_more_sequences_than_a_grid_has_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second direction of a grid ends at 65,535: sparse attention makes of every query of a
        prompt a sequence.
        """
        grids: dict[str, tuple[int, ...]] = {}

        class Kernel:
            def __init__(self, name: str) -> None:
                self.name = name

            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                grids[self.name] = grid
                return lambda *_, **__: None

        for name in ("_absorbed_kernel", "_join_kernel"):
            monkeypatch.setattr(decode_module, name, Kernel(name))
        batch = make_batch([(5, 1)], torch.device("cpu"))
        count = 70_000
        metadata = dataclasses.replace(
            batch.metadata,
            block_tables=batch.metadata.block_tables.expand(count, -1),
            context_lens=batch.metadata.context_lens.expand(count),
            cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        )
        q = batch.q.expand(count, -1, -1)
        for splits in (1, 2):
            monkeypatch.setattr(decode_module, "num_splits", lambda *_, s=splits: s)
            mla_decode(q, batch.cache, batch.up_proj, metadata, SCALE)
            assert grids["_absorbed_kernel"] == (count, splits)
        rows, columns = grids["_join_kernel"]
        assert rows == count * TINY.heads
        assert columns < 65_536

    def test_lengths_that_only_the_device_knows(self, device: torch.device) -> None:
        """As in a graph: a bound far above the lengths, and tables as wide as the bound."""
        batch = make_batch([(21, 1), (5, 1)], device)
        tables = torch.nn.functional.pad(batch.metadata.block_tables, (0, 100))
        bound = tables.shape[1] * TINY.block_size
        check(mla_decode, batch, block_tables=tables, context_lens_cpu=None, max_context_len=bound)

    def test_padding_sequences_change_nothing(self, device: torch.device) -> None:
        """A graph pads a batch with sequences that see a query's length of block 0."""
        batch = make_batch([(21, 2)], device, blocks=list(range(6)))
        metadata = batch.metadata
        tables = torch.zeros(3, metadata.block_tables.shape[1], dtype=torch.int32, device=device)
        tables[0] = metadata.block_tables[0]
        padded = dataclasses.replace(
            metadata,
            block_tables=tables,
            context_lens=torch.tensor([21, 2, 2], dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=device),
            query_lens_cpu=(2, 2, 2),
            context_lens_cpu=None,
        )
        q = torch.nn.functional.pad(batch.q, (0, 0, 0, 0, 0, 4))
        out = mla_decode(q, batch.cache, batch.up_proj, padded, SCALE)
        torch.testing.assert_close(out[:2], run(mla_decode, batch), atol=1e-6, rtol=0)
        assert out.isfinite().all()


@pytest.fixture
def latents_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are computed as on Hopper."""
    if device.type != "cpu":
        pytest.skip("a GPU runs the tiles that suit it")
    monkeypatch.setattr(decode_module, "current_platform", lambda: TestRefusals.H200)


@pytest.mark.usefixtures("latents_first")
class TestLatentsFirst:
    SIZES: ClassVar = dataclasses.replace(TINY, block_size=64)
    RAGGED: ClassVar = dataclasses.replace(RAGGED, block_size=128)
    KIMI: ClassVar = dataclasses.replace(KIMI_TP8, block_size=64)

    def test_where_the_instruction_of_warp_groups_takes_them(self, device: torch.device) -> None:
        def first(rows: int, sizes: Sizes, storage: torch.dtype | None = None) -> bool:
            cache = make_batch([(4, 1)], device, sizes, torch.bfloat16, storage).cache
            return decode_tiles(TestRefusals.H200, rows, torch.bfloat16, cache).latents_first

        assert first(8, self.SIZES)
        assert first(32, self.SIZES)
        assert not first(64, self.SIZES)  # rows enough
        assert not first(8, TINY)
        assert not first(8, self.SIZES, torch.float8_e4m3fn)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_type(self, dtype: torch.dtype, device: torch.device) -> None:
        check(mla_decode, make_batch([(150, 1), (3, 3)], device, self.SIZES, dtype))

    def test_ragged_widths(self, device: torch.device) -> None:
        check(mla_decode, make_batch([(140, 3), (64, 1)], device, self.RAGGED, torch.bfloat16))

    @pytest.mark.parametrize("splits", [1, 3])
    def test_eight_heads_of_a_rank(
        self, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decode_module, "num_splits", lambda *_: splits)
        check(mla_decode, make_batch([(150, 1), (33, 4)], device, self.KIMI, torch.bfloat16))

    def test_tables_as_wide_as_a_bound(self, device: torch.device) -> None:
        batch = make_batch([(21, 1), (5, 1)], device, self.SIZES, torch.bfloat16)
        tables = torch.nn.functional.pad(batch.metadata.block_tables, (0, 10))
        bound = tables.shape[1] * self.SIZES.block_size
        check(mla_decode, batch, block_tables=tables, context_lens_cpu=None, max_context_len=bound)


class TestPrefill:
    MIXED = ((40, 30), (9, 1), (60, 2), (17, 17), (16, 16), (3, 3))

    @pytest.mark.parametrize("known", [True, False])
    def test_short_and_long_ones_side_by_side(self, known: bool, device: torch.device) -> None:
        batch = make_batch(list(self.MIXED), device)
        check(mla_prefill, batch, **({} if known else {"context_lens_cpu": None}))

    @pytest.mark.parametrize(("dtype", "fp8"), STORED)
    def test_every_type(self, dtype: torch.dtype, fp8: str | None, device: torch.device) -> None:
        storage = FP8.get(fp8 or "")
        needs(storage, device)
        check(mla_prefill, make_batch([(37, 20), (15, 15)], device, TINY, dtype, storage))

    @pytest.mark.parametrize(
        ("room", "known"),
        [
            (7, True),
            (64, False),
            *(pytest.param(*each, marks=SLOW) for each in ((7, False), (64, True))),
        ],
    )
    def test_rounds(
        self, room: int, known: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elements = room * TINY.heads * (TINY.nope + TINY.v)
        monkeypatch.setattr(prefill_module, "_ROUND_ELEMENTS", elements)
        batch = make_batch([(50, 20), (33, 33)], device)
        check(mla_prefill, batch, **({} if known else {"context_lens_cpu": None}))

    @pytest.mark.parametrize(
        ("room", "known"),
        [
            (64, True),
            (400, False),
            *(pytest.param(*each, marks=SLOW) for each in ((64, False), (400, True))),
        ],
    )
    def test_splits(
        self, room: int, known: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In one round and in several; some splits end before a tile's queries, some are empty."""
        elements = room * TINY.heads * (TINY.nope + TINY.v)
        monkeypatch.setattr(prefill_module, "_ROUND_ELEMENTS", elements)
        monkeypatch.setattr(prefill_module, "num_splits", lambda *_: 3)
        batch = make_batch([(230, 90), (33, 33), (40, 2), (20, 20)], device)
        check(mla_prefill, batch, **({} if known else {"context_lens_cpu": None}))

    def test_splits_of_bfloat16(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prefill_module, "num_splits", lambda *_: 5)
        check(mla_prefill, make_batch([(300, 200)], device, RAGGED, torch.bfloat16))

    def test_few_tiles_of_a_long_context_fill_the_device(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """16 programs of 256 queries and 8 heads, whatever the context, would leave it idle."""
        monkeypatch.setattr(prefill_module, "compute_units", lambda: 132)
        asked = []

        def none(programs: int, keys: int, slots: int) -> int:
            asked.append((programs, keys, slots))
            return 1

        monkeypatch.setattr(prefill_module, "num_splits", none)
        batch = make_batch([(170, 150), (60, 40)], device)
        mla_prefill(batch.q, batch.cache, batch.up_proj, batch.metadata, SCALE)
        tiles = 3  # of 64 queries in float32
        assert asked == [(tiles * TINY.heads * 2, 170, 132)]
        assert prefill_splits(16, 8192, 132) == 7
        assert prefill_splits(16, 2047, 132) == 1

    def test_layers_share_what_is_uploaded(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once a step for each run of long sequences, also beside short ones and in rounds."""
        uploads: list[torch.Tensor] = []

        def counted(numbers: torch.Tensor, to: torch.device) -> torch.Tensor:
            uploads.append(numbers)
            return upload(numbers, to)

        monkeypatch.setattr(prefill_module, "upload", counted)
        elements = 16 * TINY.heads * (TINY.nope + TINY.v)
        monkeypatch.setattr(prefill_module, "_ROUND_ELEMENTS", elements)
        for lengths, runs in (([(40, 30), (9, 1), (33, 20)], 2), ([(40, 30), (33, 20)], 1)):
            uploads.clear()
            batch = make_batch(lengths, device)
            for _ in range(3):
                mla_prefill(batch.q, batch.cache, batch.up_proj, batch.metadata, SCALE)
            assert len(uploads) == runs

    def test_several_tiles_of_queries_after_a_prefix(self, device: torch.device) -> None:
        check(mla_prefill, make_batch([(170, 150)], device))
        check(mla_prefill, make_batch([(300, 200)], device, RAGGED, torch.bfloat16))

    def test_widths_of_the_model(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prefill_module, "absorb_limit", lambda *_: 1.0)
        sizes = dataclasses.replace(KIMI_TP8, heads=2)
        check(mla_prefill, make_batch([(90, 70)], device, sizes, torch.bfloat16))

    def test_where_absorbing_is_always_cheaper(self, device: torch.device) -> None:
        sizes = dataclasses.replace(TINY, rank=16, nope=16, v=24)
        assert torch_mla.absorb_limit(16, 40) == float("inf")
        check(mla_prefill, make_batch([(60, 40), (2, 2)], device, sizes))


@pytest.mark.parametrize("attend", [mla_decode, mla_prefill], ids=["decode", "prefill"])
def test_equals_the_torch_op(attend: Attend, device: torch.device) -> None:
    batch = make_batch([(33, 16), (20, 1), (15, 15)], device)
    expected = run(torch_mla.mla_attention, batch)
    torch.testing.assert_close(run(attend, batch), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attend", [mla_decode, mla_prefill], ids=["decode", "prefill"])
def test_far_blocks(attend: Attend, device: torch.device) -> None:
    """Block ids beyond 65,535, elements beyond 2^31 of the pool."""
    block_elements = TINY.block_size * (TINY.rank + TINY.rope)
    last = 2**31 // block_elements + 8
    blocks = [last, 65_536 + 7, 7, last - 1, 1 << 17, 0, 3]
    batch = make_batch([(26, 16)], device, dtype=torch.bfloat16, blocks=blocks)
    assert batch.cache.latent[last].data_ptr() - batch.cache.latent.data_ptr() > 2 * 2**31
    check(attend, batch)


class TestWrite:
    @pytest.mark.parametrize("fp8", [None, *FP8])
    @pytest.mark.parametrize("sizes", [TINY, RAGGED, KIMI_TP8], ids=["tiny", "ragged", "kimi"])
    def test_leaves_what_the_torch_op_leaves(
        self, fp8: str | None, sizes: Sizes, device: torch.device
    ) -> None:
        """Saturated, rounded, and bit for bit but for NaN's sign; slot -1 nowhere."""
        storage = FP8.get(fp8 or "", torch.bfloat16)
        needs(storage, device)
        latent = torch.randn(6, sizes.rank).bfloat16() * 3
        latent[0, :4] = torch.tensor([1e4, -1e4, float("nan"), 0.0])
        # As rotation leaves it: not dense over tokens.
        k_rope = torch.randn(6, 2, sizes.rope).bfloat16()[:, 1]
        slots = torch.tensor([3, -1, 2 * sizes.block_size + 1, 0, -1, 3 * sizes.block_size - 1])
        scale = torch.tensor([0.037]) if fp8 else None
        shape = (3, sizes.block_size, sizes.rank + sizes.rope)
        expected = LatentCacheTensor(torch.zeros(shape, dtype=storage), scale)
        torch_mla.mla_cache_write(latent, k_rope, expected, slots)
        written = LatentCacheTensor(
            torch.zeros(shape, dtype=storage, device=device),
            None if scale is None else scale.to(device),
        )
        mla_cache_write(latent.to(device), k_rope.to(device), written, slots.to(device))
        found, wanted = written.latent.cpu(), expected.latent
        are_nan = wanted.float().isnan()
        assert torch.equal(found.float().isnan(), are_nan)
        as_bits = torch.int16 if fp8 is None else torch.uint8
        found, wanted = (x.view(as_bits).masked_fill(are_nan, 0) for x in (found, wanted))
        assert torch.equal(found, wanted)

    def test_far_slots(self, device: torch.device) -> None:
        last = 2**31 // (4 * 40) + 8
        pool = torch.empty(last + 1, 4, 40, dtype=torch.bfloat16, device=device)
        rows = torch.randn(3, 40).bfloat16().to(device)
        slots = torch.tensor([last * 4 + 3, 65_540 * 4, 5], device=device)
        mla_cache_write(rows[:, :32], rows[:, 32:], LatentCacheTensor(pool), slots)
        assert torch.equal(torch.stack((pool[last, 3], pool[65_540, 0], pool[1, 1])), rows)


class TestSizing:
    def test_they_are_searched_once_for_each_shape(self) -> None:
        """Each layer of an eager step asks."""
        fewest_that_fill.cache_clear()
        for _ in range(61):
            num_splits(7, 8192, 304)
        found = fewest_that_fill.cache_info()
        assert (found.misses, found.hits) == (1, 60)

    def test_enough_programs_and_no_tiny_splits(self) -> None:
        assert num_splits(1, 1 << 20, 512) == 256
        assert num_splits(1, 1000, 512) == 16
        assert num_splits(1, 1, 512) == 1
        assert num_splits(64, 8192, 512) == 7
        assert num_splits(100, 8192, 512) == 5
        assert num_splits(5000, 8192, 512) == 1

    @settings(max_examples=50)
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 50))
    def test_rounds_cover_every_key_once_and_in_order(self, contexts: list[int], room: int) -> None:
        rounds = plan_rounds(contexts, room)
        for pieces in rounds:
            sizes = [end - first for _, first, end, _ in pieces]
            assert [row for *_, row in pieces] == [sum(sizes[:i]) for i in range(len(sizes))]
            assert 0 < sum(sizes) <= room
            assert len({sequence for sequence, *_ in pieces}) == len(pieces)
        for sequence, context in enumerate(contexts):
            mine = [piece for pieces in rounds for piece in pieces if piece[0] == sequence]
            assert (mine[0][1], mine[-1][2]) == (0, context)
            assert all(before[2] == after[1] for before, after in pairwise(mine))


class TestRefusals:
    SHAPE: ClassVar = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    H200, MI300 = Platform("cuda", "sm90", True), Platform("rocm", "gfx942", True)

    def refusal(self, platform: Platform, storage: torch.dtype, **shape: int) -> str | None:
        query = OpQuery(platform, torch.bfloat16, {**self.SHAPE, **shape}, storage)
        return decode_module.refuses(query)

    def test_published_sizes_run(self) -> None:
        assert self.refusal(self.MI300, torch.bfloat16) is None
        assert self.refusal(self.MI300, torch.float8_e4m3fnuz) is None
        assert self.refusal(self.H200, torch.float8_e4m3fn) is None

    def test_what_does_not_fit_is_named(self) -> None:
        wide = self.refusal(self.H200, torch.bfloat16, kv_lora_rank=1024)
        assert wide == "kv_lora_rank=1024 is larger than 512"
        wide = self.refusal(self.H200, torch.bfloat16, qk_rope_head_dim=128)
        assert wide == "qk_rope_head_dim=128 is larger than 64"
        assert "float8_e4m3fnuz" in str(self.refusal(self.H200, torch.float8_e4m3fnuz))
