"""The C++ kernels against float64, against torch's, and against themselves in other batches."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.environment import cache_dir
from atom.model_ops.kernels.native import attention, bindings, elementwise, linear
from atom.model_ops.kernels.native import sampling as native_sampling
from atom.model_ops.kernels.native.build import NativeBuild, build, native_build
from atom.model_ops.kernels.torch import attention as torch_attention
from atom.model_ops.kernels.torch import elementwise as torch_elementwise
from atom.model_ops.kernels.torch import linear as torch_linear
from atom.model_ops.kernels.torch import sampling as torch_sampling
from atom.model_ops.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.ops import OPS
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import Platform, current_platform

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

DTYPES = [torch.float32, torch.bfloat16]
if REASON is None and bindings.constant("has_float16"):
    DTYPES.append(torch.float16)
# Twice the rounding of a result, and the errors of float32 sums.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ATOL = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 2e-4}

CPU = Platform("cpu", "avx2", has_native_bf16=False)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact.double(), rtol=RTOL[dtype], atol=ATOL[dtype])


# ---- linear -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 96, 576])
@pytest.mark.parametrize("outs", [1, 3, 37, 100, 515])
def test_linear_equals_the_exact_product(dtype: torch.dtype, size: int, outs: int) -> None:
    op = linear.linear
    weight, bias = random(outs, size, dtype=dtype), random(outs, dtype=dtype, seed=1)
    for rows in (0, 1, 2, 3, 7, 17, 130):
        x = random(rows, size, dtype=dtype, seed=2) / size**0.5
        exact = x.double() @ weight.double().T
        assert_near(op(x, weight, None), exact, dtype)
        assert_near(op(x, weight, bias), exact + bias.double(), dtype)
        theirs = torch_linear.linear_upcast(x, weight, bias)
        torch.testing.assert_close(op(x, weight, bias), theirs, rtol=RTOL[dtype], atol=ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 1536])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, size: int) -> None:
    op = linear.linear
    weight, x = random(331, size, dtype=dtype), random(200, size, dtype=dtype, seed=1)
    everything = op(x, weight, None)
    torch.set_num_threads(2)
    for rows in (*range(1, 24), 63, 64, 97, 199):
        assert torch.equal(op(x[:rows], weight, None), everything[:rows])
        assert torch.equal(op(x[-rows:], weight, None), everything[-rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "size"), [(1, 32), (31, 96), (515, 576)])
def test_logits_are_float32_sums(dtype: torch.dtype, outs: int, size: int) -> None:
    """Within 1e-5 of the float64 product, also in torch and on matrix tiles (64 rows or more)."""
    weight = random(outs, size, dtype=dtype)
    for rows in (0, 1, 5, 63, 64, 81, 130):
        x = random(rows, size, dtype=dtype, seed=2)
        exact = x.double() @ weight.double().T
        for op in (linear.logits, torch_linear.logits):
            got = op(x, weight)
            assert got.dtype is torch.float32
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5 * size**0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_logits_have_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weight, wide = random(331, 576, dtype=dtype), random(63, 600, dtype=dtype, seed=1)
    x = wide[:, 8:584]  # rows that lie apart
    everything = linear.logits(x, weight)
    torch.set_num_threads(2)
    for rows in (1, 2, 7, 23, 62):
        assert torch.equal(linear.logits(x[-rows:].contiguous(), weight), everything[-rows:])
    tall = wide.repeat(3, 1)[:, 8:584]
    assert torch.equal(linear.logits(tall, weight)[:63], linear.logits(tall, weight)[63:126])


def test_linear_reads_rows_that_lie_apart() -> None:
    weight, wide = random(48, 64), random(5, 200)
    op = linear.linear
    view = wide[:, 100:164]
    assert torch.equal(op(view, weight, None), op(view.contiguous(), weight, None))
    turned = random(64, 5).T
    assert torch.equal(op(turned, weight, None), op(turned.contiguous(), weight, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_linear_keeps_what_is_not_finite(dtype: torch.dtype, value: float) -> None:
    weight, x = torch.ones(4, 32, dtype=dtype), torch.ones(3, 32, dtype=dtype)
    x[1, 5] = value
    out = linear.linear(x, weight, None)
    torch.testing.assert_close(out, F.linear(x, weight), equal_nan=True)


def test_a_result_beyond_the_type_becomes_infinite() -> None:
    x = torch.full((1, 32), 3e38, dtype=torch.bfloat16)
    out = linear.linear(x, torch.ones(2, 32, dtype=torch.bfloat16), None)
    assert torch.equal(out, torch.full((1, 2), float("inf"), dtype=torch.bfloat16))


def test_linear_refuses_operands_that_do_not_fit() -> None:
    op = linear.linear
    x, weight = random(2, 64), random(8, 64)
    for wrong in (random(8, 32), random(8, 64).bfloat16(), random(64, 8).T):
        with pytest.raises(ValueError, match=r"linear.*\[2, 64\]"):
            op(x, wrong, None)
    with pytest.raises(ValueError, match="bias"):
        op(x, weight, random(9))
    with pytest.raises(ValueError, match="not enough values"):
        op(x[0], weight, None)


# ---- elementwise --------------------------------------------------------------------------


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 30, 64, 576, 2048])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    weight = random(size, dtype=dtype)
    for rows in (0, 1, 5, 70):
        x = random(rows, size, dtype=dtype, seed=1)
        exact = exact_norm(x, weight, 1e-5)
        assert_near(elementwise.rms_norm(x, weight, 1e-5), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_the_heads_of_a_fused_projection(dtype: torch.dtype) -> None:
    fused, weight = random(6, 8 * 48, dtype=dtype), random(48, dtype=dtype, seed=1)
    heads = fused.view(6, 8, 48)[:, 2:5]
    op = elementwise.rms_norm
    assert torch.equal(op(heads, weight, 1e-6), op(heads.contiguous(), weight, 1e-6))
    every_other = random(6, 96, dtype=dtype)[:, ::2]
    assert torch.equal(op(every_other, weight, 1e-6), op(every_other.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [30, 576])
def test_add_rms_norm_rounds_the_sum_first(dtype: torch.dtype, size: int) -> None:
    op, weight = elementwise.add_rms_norm, random(size, dtype=dtype)
    for rows in (0, 1, 4, 70):
        x = random(rows, size, dtype=dtype, seed=1)
        residual = random(rows, size, dtype=dtype, seed=2)
        out, total = op(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert_near(out, exact_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 1536])
def test_silu_and_mul(dtype: torch.dtype, size: int) -> None:
    op = elementwise.silu_and_mul
    for rows in (0, 1, 3, 50):
        x = random(rows, 2 * size, dtype=dtype) * 4
        gate, up = x.double().chunk(2, dim=-1)
        assert_near(op(x), F.silu(gate) * up, dtype)


def test_silu_of_extreme_gates() -> None:
    gates = torch.tensor([-1e4, -200.0, -90.0, -88.0, -20.0, 0.0, 20.0, 90.0, 1e4, float("nan")])
    x = torch.cat((gates, torch.ones_like(gates)))[None]
    got = elementwise.silu_and_mul(x)[0]
    torch.testing.assert_close(got, F.silu(gates), rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 40), (128, 128)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    op = elementwise.rope
    table = random(50, rotary_dim, seed=3)
    for rows in (0, 1, 5, 130):
        positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(4))
        fused = random(rows, 8, head_dim, dtype=dtype)
        q, k = fused[:, :5], fused[:, 5:7]
        for got, x in zip(op(positions, q, k, table, interleaved), (q, k), strict=True):
            wide = x.double(), x.double(), table.double()
            exact, _ = torch_elementwise.rope(positions, *wide, interleaved)
            assert got.is_contiguous()
            assert_near(got, exact, dtype)


def test_interleaved_pairs_rotate_like_the_halves_they_become() -> None:
    x, table, positions = random(5, 3, 40), random(9, 24, seed=1), torch.arange(5)
    halves = torch.cat((x[..., 0:24:2], x[..., 1:24:2], x[..., 24:]), dim=-1)
    for rope in (torch_elementwise.rope, elementwise.rope):
        for one, other in zip(
            rope(positions, x, x, table, True),
            rope(positions, halves, halves, table, False),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_rope_refuses_a_position_outside_the_table() -> None:
    q = random(2, 1, 16)
    for bad in (-1, 10):
        with pytest.raises(IndexError, match=f"position {bad} .* 10"):
            elementwise.rope(torch.tensor([3, bad]), q, q, random(10, 16), False)


# ---- masks --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5000])
@pytest.mark.parametrize("rows", [None, [4, 0, 2], []])
def test_masked_tokens_equal_torchs(vocab: int, rows: list[int] | None) -> None:
    scores = random(5, vocab)
    scores[0, 0], scores[4, -1] = float("nan"), float("inf")
    count = 5 if rows is None else len(rows)
    generator = torch.Generator().manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=generator).int()
    index = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    expected = scores.clone()
    torch_sampling.mask_tokens(expected, words, index)
    native_sampling.mask_tokens(scores, words, index)
    assert torch.equal(scores.view(torch.int32), expected.view(torch.int32))


def test_masks_that_fit_no_scores_are_refused() -> None:
    op, scores = native_sampling.mask_tokens, random(3, 64)
    words = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"mask_tokens .* scores \[3, 64\]"):
        op(scores, words, None)
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=f"row {bad} of 3"):
            op(scores, words, torch.tensor([bad]))


# ---- attention ----------------------------------------------------------------------------


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
        seen = keys <= last
        if window is not None:
            seen &= keys > last - window
        weights = scores.masked_fill(~seen, -float("inf")).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, value))
        start += queries
    return torch.cat(out) if out else q.double()


def assert_attends(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Near, with weights that may have been rounded to bfloat16."""
    atol = 4e-3 if dtype is torch.bfloat16 else ATOL[dtype]
    torch.testing.assert_close(got.double(), exact.double(), rtol=RTOL[dtype], atol=atol)


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
        assert_attends(got, exact, dtype)
        if dtype != torch.float16:
            theirs = torch_attention.paged_attention(q, cache, metadata, head_dim**-0.5, window)
            error = (theirs.double() - exact).abs().max()
            assert (got.double() - exact).abs().max() <= 1.2 * error + ATOL[torch.float32]


sequences = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 300)).map(lambda p: (p[0], p[0] + p[1])),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=25)
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
def test_a_query_has_the_same_bits_in_every_batch(dtype: torch.dtype, window: int | None) -> None:
    """Alone, beside other queries of its sequence, and beside other sequences."""
    op = attention.paged_attention
    context = 333
    cache, alone = paged([(context, context)], 3, 64, 16, dtype)
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


def test_attention_never_reads_what_a_query_may_not_see() -> None:
    cache, metadata = paged([(3, 50)], 2, 64, 16)
    q = random(3, 4, 64)
    op = attention.paged_attention
    want = op(q, cache, metadata, 0.125, 20)
    for position in (*range(28), *range(50, 64)):  # before the window, after the context
        block = metadata.block_tables[0, position // 16]
        cache.key[block, position % 16] = float("nan")
        cache.value[block, position % 16] = float("nan")
    assert torch.equal(op(q, cache, metadata, 0.125, 20), want)


def test_attention_survives_huge_scores() -> None:
    cache, metadata = paged([(2, 100)], 1, 64, 16)
    q = random(2, 1, 64) * 1e4
    got = attention.paged_attention(q, cache, metadata, 1.0, None)
    assert_near(got, exact_attention(q, cache, metadata, 1.0, None), torch.float32)


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


def test_threads_change_no_bit() -> None:
    weight, x = random(300, 576), random(200, 576, seed=1)
    table, positions = random(200, 64, seed=2), torch.arange(200)
    norm_weight = random(576)

    def run() -> list[torch.Tensor]:
        out = linear.linear(x, weight, None)
        normed, total = elementwise.add_rms_norm(x, x, norm_weight, 1e-5)
        gated = elementwise.silu_and_mul(x)
        heads = x.view(200, 9, 64)
        rotated = elementwise.rope(positions, heads, heads, table, False)
        return [out, normed, total, gated, *rotated]

    alone = run()
    torch.set_num_threads(3)
    for one, other in zip(alone, run(), strict=True):
        assert torch.equal(one, other)


# ---- table and build ----------------------------------------------------------------------


@pytest.mark.parametrize("op", ["linear", "rms_norm", "silu_and_mul", "rope", "paged_attention"])
def test_the_table_prefers_native_kernels_on_a_cpu(op: str) -> None:
    shape = {"in_features": 64, "head_dim": 64, "size": 64}
    table = OpTable(CPU, OPS)
    table.resolve(op, torch.bfloat16, torch.bfloat16, **shape)
    assert table.describe().splitlines()[1].split() == [op, "native"]
    [native] = [candidate for candidate in OPS[op] if candidate.name == "native"]
    reason = native.supports(OpQuery(Platform("cuda", "sm90", True), torch.bfloat16, shape))
    assert reason == "runs on CPUs only"
    assert native.supports(OpQuery(CPU, torch.float64, shape)) is not None


def test_the_table_says_why_a_shape_is_refused() -> None:
    table = OpTable(CPU, OPS)
    table.resolve("linear", torch.float32, in_features=40, out_features=8)
    table.resolve("kv_cache_write", torch.float32, torch.bfloat16, head_dim=64)
    assert "not native: in_features=40 is no multiple of 32" in table.describe()
    assert "not native: the cache holds torch.bfloat16" in table.describe()


def test_without_a_build_torch_runs_and_the_reason_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bindings, "native_build", lambda: NativeBuild(None, "no C++ compiler"))
    table = OpTable(current_platform(), OPS)
    table.resolve("rms_norm", torch.float32, size=64)
    assert table.describe().splitlines()[1] == "rms_norm  torch  not native: no C++ compiler"


def fresh_build(environment: dict[str, str]) -> str:
    program = (
        "from atom.model_ops.kernels.native.build import native_build; print(native_build().reason)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_missing_or_failing_compiler_is_a_reason(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "ATOM_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    assert fresh_build(nowhere).startswith("no C++ compiler: looked for c++, g++, clang++")
    assert "looked for nonsense++" in fresh_build(nowhere | {"CXX": "nonsense++"})
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of luck" >&2\nexit 1\n')
    broken.chmod(0o755)
    reason = fresh_build(nowhere | {"CXX": str(broken), "PATH": "/bin:/usr/bin"})
    assert "broken failed: out of luck" in reason


def test_a_build_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.model_ops.kernels.native.build._run", None)
    assert build(cache_dir() / "native").exists()


def test_a_caller_keeps_its_helpers() -> None:
    big = random(512, 512)
    tasks = Path("/proc/self/task")

    def call() -> None:
        torch.set_num_threads(3)
        for _ in range(20):
            linear.linear(big, big, None)

    call()
    before = len(list(tasks.iterdir()))
    call()
    assert len(list(tasks.iterdir())) == before
    other = threading.Thread(target=call)
    other.start()
    other.join()
    deadline = time.monotonic() + 10
    while len(list(tasks.iterdir())) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(tasks.iterdir())) == before  # helpers end with their caller


def test_a_forked_process_works_without_helpers() -> None:
    code = (
        "import os, torch\n"
        "from atom.model_ops.kernels.native.linear import linear\n"
        "x = torch.ones(256, 256)\n"
        "torch.set_num_threads(3)\n"
        "linear(x, x, None)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if bool((linear(x, x, None) == 256).all()) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "0"
