"""Native paged attention against float64, torch's, and itself in other batches."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_ops.native_numbers import one_thread, random  # noqa: F401  # a fixture

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.native import attention, bindings
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import attention as torch_attention
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import Platform

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

DTYPES = [torch.float32, torch.bfloat16]
if REASON is None and bindings.constant("has_float16"):
    DTYPES.append(torch.float16)
# Twice the rounding of a result, and the errors of float32 sums; with bfloat16 weights of values
# may be rounded, too.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ATOL = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 2e-4}

CPU = Platform("cpu", "avx2", has_native_bf16=False)
FP8 = torch.float8_e4m3fn


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact.double(), rtol=RTOL[dtype], atol=ATOL[dtype])


def in_fp8(cache: KVCacheTensor, key_scale: float = 1.0, value_scale: float = 1.0) -> KVCacheTensor:
    """The same cache with its numbers divided by scales and rounded."""
    return KVCacheTensor(
        (cache.key.float() / key_scale).to(FP8),
        (cache.value.float() / value_scale).to(FP8),
        torch.tensor([key_scale]),
        torch.tensor([value_scale]),
    )


def as_stored(cache: KVCacheTensor) -> KVCacheTensor:
    """What an FP8 cache holds, in float64."""
    assert cache.key_scale is not None
    assert cache.value_scale is not None
    return KVCacheTensor(
        cache.key.double() * cache.key_scale.double(),
        cache.value.double() * cache.value_scale.double(),
    )


def paged(
    lens: list[tuple[int, int]],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[KVCacheTensor, AttentionMetadata]:
    """A pool with shuffled blocks for sequences of (query length, context length)."""
    blocks = [-(-context // block_size) for _, context in lens]
    order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.zeros(len(lens), max(blocks, default=0), dtype=torch.int32)
    for row, count in zip(tables, blocks, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
    shape = (sum(blocks) + 3, block_size, kv_heads, head_dim)
    cache = KVCacheTensor(
        random(*shape, dtype=dtype, seed=seed + 1), random(*shape, dtype=dtype, seed=seed + 2)
    )
    queries = [q for q, _ in lens]
    contexts = [c for _, c in lens]
    metadata = AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=tables,
        block_counts=torch.tensor(blocks, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max_seqlen_q=max(queries, default=0),
        max_context_len=max(contexts, default=0),
        query_lens_cpu=tuple(queries),
        context_lens_cpu=tuple(contexts),
    )
    return cache, metadata


def exact_attention(
    q: torch.Tensor,
    cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> torch.Tensor:
    out, start = [], 0
    for b, (queries, context) in enumerate(
        zip(metadata.query_lens_cpu, metadata.context_lens_cpu, strict=True)
    ):
        blocks = metadata.block_tables[b].long()
        key = cache.key[blocks].flatten(0, 1)[:context].double()
        value = cache.value[blocks].flatten(0, 1)[:context].double()
        group = q.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start : start + queries].double(), key) * scale
        last = torch.arange(context - queries, context)[:, None]
        keys = torch.arange(context)
        seen = keys <= (last if causal else torch.full_like(last, context))
        if window is not None:
            seen &= keys > last - window
        weights = scores.masked_fill(~seen, -float("inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, value))
        start += queries
    return torch.cat(out) if out else q.double()


RAGGED = [(1, 1), (1, 200), (4, 131), (3, 3), (70, 70), (50, 300), (1, 64), (16, 65)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_attention_equals_the_exact_one(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int
) -> None:
    op = attention.paged_attention
    for block_size, window in ((16, None), (128, 40)):
        cache, metadata = paged(RAGGED, kv_heads, head_dim, block_size, dtype)
        q = random(sum(n for n, _ in RAGGED), heads, head_dim, dtype=dtype, seed=9)
        got = op(q, cache, metadata, head_dim**-0.5, window)
        exact = exact_attention(q, cache, metadata, head_dim**-0.5, window)
        assert_near(got, exact, dtype)
        if dtype != torch.float16:
            theirs = torch_attention.paged_attention(q, cache, metadata, head_dim**-0.5, window)
            error = (theirs.double() - exact).abs().max()
            assert (got.double() - exact).abs().max() <= 1.2 * error + ATOL[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 20)])
def test_queries_of_a_block_see_all_of_it(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    lens = [(8, 8), (8, 200), (1, 64), (16, 65), (7, 70), (70, 300)]
    q = random(sum(n for n, _ in lens), heads, head_dim, dtype=dtype, seed=9)
    for block_size, window in ((16, None), (7, 5), (128, 40)):
        cache, metadata = paged(lens, kv_heads, head_dim, block_size, dtype)
        args = q, cache, metadata, head_dim**-0.5, window
        exact = exact_attention(*args, causal=False)
        assert_near(attention.block_attention(*args), exact, dtype)
        if dtype != torch.float16:
            theirs = torch_attention.block_attention(*args)
            torch.testing.assert_close(theirs.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [4, 40])
def test_a_context_may_be_shorter_than_its_queries(dtype: torch.dtype, heads: int) -> None:
    """A causal query before the context sees nothing, and gets zeros."""
    lens = [(8, 3), (16, 1), (8, 8)]
    cache, metadata = paged(lens, 1, 64, 4, dtype)
    q = random(32, heads, 64, dtype=dtype)
    for causal, op in ((True, attention.paged_attention), (False, attention.block_attention)):
        exact = exact_attention(q, cache, metadata, 0.125, None, causal).nan_to_num()
        assert_near(op(q, cache, metadata, 0.125, None), exact, dtype)


sequences = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 300)).map(lambda p: (p[0], p[0] + p[1])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25)
@given(
    lens=sequences,
    block_size=st.sampled_from([1, 7, 16, 48, 128]),
    window=st.none() | st.integers(1, 350),
    heads=st.sampled_from([(1, 1), (6, 2), (15, 3)]),
    seed=st.integers(0, 1000),
)
def test_attention_over_any_lengths(
    lens: list[tuple[int, int]],
    block_size: int,
    window: int | None,
    heads: tuple[int, int],
    seed: int,
) -> None:
    cache, metadata = paged(lens, heads[1], 64, block_size, seed=seed)
    q = random(sum(n for n, _ in lens), heads[0], 64, seed=seed + 7)
    got = attention.paged_attention(q, cache, metadata, 0.125, window)
    assert_near(got, exact_attention(q, cache, metadata, 0.125, window), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("storage", ["auto", "fp8"])
def test_a_query_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, window: int | None, storage: str
) -> None:
    """Alone, beside other queries of its sequence, and beside other sequences."""
    op = attention.paged_attention
    context = 333
    cache, alone = paged([(context, context)], 3, 64, 16, dtype)
    if storage == "fp8":
        cache = in_fp8(cache, 0.5, 0.3)
    q = random(context, 9, 64, dtype=dtype, seed=5)
    whole = op(q, cache, alone, 0.125, window)
    torch.set_num_threads(2)  # deals the chunks of one query's context to several tasks
    for stop in (1, 64, 65, 200, context):
        for queries in (1, 2, 5, 16, 64):
            if queries > stop:
                continue
            part = q[stop - queries : stop]
            one = batch_of([(queries, stop, alone.block_tables[0])])
            assert torch.equal(op(part, cache, one, 0.125, window), whole[stop - queries : stop])
            two = batch_of([(7, 7, alone.block_tables[0]), (queries, stop, alone.block_tables[0])])
            mixed = op(torch.cat((q[:7], part)), cache, two, 0.125, window)
            assert torch.equal(mixed[7:], whole[stop - queries : stop])
            assert torch.equal(mixed[:7], whole[:7])


def batch_of(rows: list[tuple[int, int, torch.Tensor]]) -> AttentionMetadata:
    queries = tuple(n for n, _, _ in rows)
    contexts = tuple(c for _, c, _ in rows)
    return AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=torch.stack([table for _, _, table in rows]),
        block_counts=torch.tensor([-(-c // 16) for c in contexts], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max_seqlen_q=max(queries),
        max_context_len=max(contexts),
        query_lens_cpu=queries,
        context_lens_cpu=contexts,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_never_reads_what_a_query_may_not_see(
    dtype: torch.dtype, queries: int, window: int | None
) -> None:
    """Before the window and after the context lies what freed blocks and new memory hold."""
    context = 85
    cache, metadata = paged([(queries, context)], 2, 64, 16, dtype)
    q = random(queries, 4, 64, dtype=dtype)
    op = attention.paged_attention
    want = op(q, cache, metadata, 0.125, window)
    oldest = 0 if window is None else context - queries - window + 1
    for garbage in (torch.nan, torch.inf):
        for position in (*range(oldest), *range(context, 96)):
            block = metadata.block_tables[0, position // 16]
            cache.key[block, position % 16] = garbage
            cache.value[block, position % 16] = garbage
        assert torch.equal(op(q, cache, metadata, 0.125, window), want)


def test_attention_survives_huge_scores() -> None:
    cache, metadata = paged([(2, 100)], 1, 64, 16)
    q = random(2, 1, 64) * 1e4
    got = attention.paged_attention(q, cache, metadata, 1.0, None)
    assert_near(got, exact_attention(q, cache, metadata, 1.0, None), torch.float32)


class FloatingPoint:
    """The flags of SSE and newer instructions of this thread, by glibc's `fenv_t`."""

    _CONTROL, _SIZE, _FLAGS, _DENORMAL = 28, 64, 0x3F, 2

    def __init__(self) -> None:
        self._library = ctypes.CDLL(ctypes.util.find_library("m"))

    def saw_denormal(self) -> bool:
        """Whether an instruction had one as an operand since the last call."""
        state = (ctypes.c_uint8 * self._SIZE)()
        self._library.fegetenv(state)
        word = ctypes.c_uint32.from_buffer(state, self._CONTROL)
        saw = bool(word.value & self._DENORMAL)
        word.value &= ~self._FLAGS
        self._library.fesetenv(state)
        return saw


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not ctypes.util.find_library("m"),
    reason="reads the flags of x86 through glibc",
)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3)])
def test_what_memory_held_before_does_not_slow_attention_down(heads: int, kv_heads: int) -> None:
    """Processors compute with numbers below the least normal one many times more slowly: none is
    left of other calls where a tile has fewer rows than it could.
    """
    flags = FloatingPoint()
    cache, metadata = paged([(1, 128)], 1, 512, 64, torch.bfloat16)
    block, later = metadata.block_tables[0].tolist()
    cache.key[block], cache.key[later] = 0, 1
    cache.value[block], cache.value[later] = 1e-30, 0
    query = torch.full((1, 16, 512), 0.05, dtype=torch.bfloat16)
    flags.saw_denormal()
    attention.paged_attention(query, cache, metadata, 1.0, None)
    assert flags.saw_denormal()  # in what it leaves behind
    cache, metadata = paged([(1, 128)], kv_heads, 64, 64, torch.bfloat16)
    query = random(1, heads, 64, dtype=torch.bfloat16, seed=3)
    flags.saw_denormal()
    attention.paged_attention(query, cache, metadata, 0.1, None)
    assert not flags.saw_denormal()


def test_rows_beyond_the_last_sequence_are_zero() -> None:
    cache, metadata = paged([(2, 10)], 1, 64, 16)
    out = attention.paged_attention(random(5, 1, 64), cache, metadata, 0.125, None)
    assert torch.equal(out[2:], torch.zeros(3, 1, 64))
    assert bool((out[:2] != 0).any())


def test_attention_refuses_what_makes_no_sense() -> None:
    op = attention.paged_attention
    cache, metadata = paged([(1, 20), (2, 40)], 1, 64, 16)
    q = random(3, 1, 64)
    metadata.block_tables[1, 2] = 99
    with pytest.raises(IndexError, match=r"sequence 1 has context length 40.*99"):
        op(q, cache, metadata, 1.0, None)
    metadata.block_tables[1, 2] = 0
    metadata.context_lens[0] = 2000
    with pytest.raises(IndexError, match="sequence 0 has context length 2000"):
        op(q, cache, metadata, 1.0, None)
    metadata.context_lens[0] = 20
    for wrong in (q.bfloat16(), random(3, 1, 32)):
        with pytest.raises(ValueError, match="paged_attention"):
            op(wrong, cache, metadata, 1.0, None)


@pytest.mark.parametrize(("real", "padding", "context"), [(1, 3, 20), (3, 1, 130), (2, 15, 33)])
@pytest.mark.parametrize("op", [attention.paged_attention, attention.block_attention])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_pads_a_graph_is_not_read(
    dtype: torch.dtype, op: Any, real: int, padding: int, context: int
) -> None:
    """Nobody wrote its keys: they may be another sequence's NaN."""
    shapes = (2, 64, 16)
    cache, alone = paged([(2, 9), (real, context)], *shapes, dtype)
    padded_cache, padded = paged([(2, 9), (real + padding, context + padding)], *shapes, dtype)
    lens = torch.tensor([0, padding], dtype=torch.int32)
    blocks = [own.block_tables[1] for own in (alone, padded)]
    for mine, theirs in ((padded_cache.key, cache.key), (padded_cache.value, cache.value)):
        mine.fill_(torch.nan)
        for row in range(2):
            for block in range(int(alone.block_counts[row])):
                ours = int(padded.block_tables[row, block])
                mine[ours] = theirs[int(alone.block_tables[row, block])]
        end = context % 16
        if end:
            mine[int(blocks[1][context // 16]), end:] = torch.nan
    q = random(2 + real + padding, 4, 64, dtype=dtype)
    got = op(q, padded_cache, replace(padded, padding_lens=lens), 0.125, None)
    assert torch.equal(got[: 2 + real], op(q[: 2 + real], cache, alone, 0.125, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_cache_write_skips_padding(dtype: torch.dtype) -> None:
    shape = (5, 16, 3, 64)
    ours = KVCacheTensor(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    theirs = KVCacheTensor(ours.key.clone(), ours.value.clone())
    fused = random(7, 9, 64, dtype=dtype)
    k, v = fused[:, :3], fused[:, 3:6]
    slots = torch.tensor([3, -1, 79, 16, -1, 0, 44])
    attention.kv_cache_write(k, v, ours, slots)
    torch_attention.kv_cache_write(k, v, theirs, slots)
    assert torch.equal(ours.key, theirs.key)
    assert torch.equal(ours.value, theirs.value)
    with pytest.raises(IndexError, match=r"slot 80 .* 5 blocks of 16"):
        attention.kv_cache_write(k[:1], v[:1], ours, torch.tensor([80]))


# ---- FP8 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_written_equal_torchs(dtype: torch.dtype) -> None:
    """Every code and its neighbours, ties, what saturates, infinities, NaN and odd sizes."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = codes[codes.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    extreme = torch.tensor([448.0, 463.9, 464.0, 480.0, 1e9, float("inf"), 2**-10, 2**-11, 1e-30])
    numbers = torch.cat((codes, ties, ties * 1.01, ties * 0.99, extreme, -extreme, random(500)))
    for head_dim, scales in ((7, (1.0, 1.0)), (64, (0.037, 3.0))):
        rows = -(-numbers.numel() // head_dim)
        padded = torch.nn.functional.pad(numbers, (0, rows * head_dim - numbers.numel()))
        k = padded.view(rows, 1, head_dim).to(dtype)
        shape = (rows, 4, 1, head_dim)
        scale = [torch.tensor([s]) for s in scales]
        ours = KVCacheTensor(torch.zeros(shape).to(FP8), torch.zeros(shape).to(FP8), *scale)
        theirs = replace(ours, key=ours.key.clone(), value=ours.value.clone())
        slots = torch.arange(rows) * 3 - 1
        attention.kv_cache_write(k, k.flip(0), ours, slots)
        torch_attention.kv_cache_write(k, k.flip(0), theirs, slots)
        for one, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_every_code_is_read_exactly(dtype: torch.dtype, head_dim: int) -> None:
    """One key: its weight is 1, and the output its value."""
    codes = torch.arange(256, dtype=torch.uint8)
    rows = -(-256 // head_dim)
    value = torch.nn.functional.pad(codes, (0, rows * head_dim - 256)).view(rows, 1, 1, head_dim)
    one = torch.ones(1)
    cache = KVCacheTensor(torch.zeros_like(value).view(FP8), value.view(FP8), one, one * 2)
    tables = torch.arange(rows, dtype=torch.int32)[:, None]
    metadata = replace(batch_of([(1, 1, row) for row in tables]), block_tables=tables)
    q = torch.ones(rows, 3, head_dim, dtype=dtype)
    got = attention.paged_attention(q, cache, metadata, 1.0, None)
    want = (value.view(FP8).to(dtype) * 2).view(rows, 1, head_dim).expand(-1, 3, -1)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [20, 64, 96, 128])
def test_attention_reads_fp8(dtype: torch.dtype, head_dim: int) -> None:
    op = attention.paged_attention
    for block_size, window in ((16, None), (7, 40)):
        wide, metadata = paged(RAGGED, 3, head_dim, block_size)
        cache = in_fp8(wide, 0.02, 0.5)
        q = random(sum(n for n, _ in RAGGED), 9, head_dim, dtype=dtype, seed=9)
        got = op(q, cache, metadata, head_dim**-0.5, window)
        exact = exact_attention(q, as_stored(cache), metadata, head_dim**-0.5, window)
        assert_near(got, exact, dtype)
        if dtype != torch.float16:
            theirs = torch_attention.paged_attention(q, cache, metadata, head_dim**-0.5, window)
            error = (theirs.double() - exact).abs().max()
            assert (got.double() - exact).abs().max() <= 1.2 * error + 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_that_is_nan_reaches_those_who_see_it(dtype: torch.dtype) -> None:
    wide, metadata = paged([(30, 70)], 1, 64, 16)
    cache = in_fp8(wide)
    position = 50
    block = metadata.block_tables[0, position // 16]
    cache.key.view(torch.uint8)[block, position % 16, 0, 3] = 0xFF
    got = attention.paged_attention(random(30, 2, 64, dtype=dtype), cache, metadata, 0.125, None)
    sees = torch.arange(40, 70) >= position
    assert bool(got[sees].isnan().all())
    assert not bool(got[~sees].isnan().any())


def test_only_fp8_and_the_models_type_are_read_natively() -> None:
    table = OpTable(CPU, OPS)
    for op in ("kv_cache_write", "paged_attention", "prefill_attention"):
        table.resolve(op, torch.bfloat16, FP8, head_dim=20)
        [native] = [candidate for candidate in OPS[op] if candidate.name == "native"]
        reason = native.supports(OpQuery(CPU, torch.float32, {"head_dim": 64}, torch.bfloat16))
        assert reason == "the cache holds torch.bfloat16, the model computes in torch.float32"
    assert "not native" not in table.describe()


def test_an_fp8_cache_needs_its_scales() -> None:
    wide, metadata = paged([(1, 20)], 1, 64, 16)
    cache, q = in_fp8(wide), random(1, 1, 64)
    for wrong in (replace(cache, key_scale=None), replace(cache, value_scale=torch.ones(2))):
        with pytest.raises(ValueError, match="paged_attention"):
            attention.paged_attention(q, wrong, metadata, 0.125, None)
        with pytest.raises(ValueError, match="kv_cache_write"):
            attention.kv_cache_write(q, q, wrong, torch.tensor([0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_long_sequence_among_short_ones_has_the_same_bits_on_more_threads(
    dtype: torch.dtype,
) -> None:
    """Its chunks are dealt to several tasks, and those of the others are not."""
    cache, metadata = paged([(1, 900), (1, 30), (5, 40), (1, 1)], 3, 64, 16, dtype)
    q = random(8, 9, 64, dtype=dtype)
    alone = attention.paged_attention(q, cache, metadata, 0.125, None)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(attention.paged_attention(q, cache, metadata, 0.125, None), alone)
