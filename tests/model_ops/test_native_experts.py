"""The C++ kernels of latent attention and experts: against torch in float64, and against themselves
in other batches.
"""

from __future__ import annotations

import pytest
import torch
from model_ops.batches import Part, attention_metadata
from model_ops.native_numbers import one_thread, random  # noqa: F401  # a fixture

from atom.model_ops.attention.metadata import AttentionMetadata, LatentCacheTensor
from atom.model_ops.kernels.native import bindings, elementwise, mla, moe
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import elementwise as torch_elementwise
from atom.model_ops.kernels.torch import mla as torch_mla
from atom.model_ops.kernels.torch import moe as torch_moe
from atom.model_ops.kernels.torch.fp8 import quantise
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.model_ops.routing import Routing
from atom.platform import cpu_platform

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

DTYPES = [torch.float32, torch.bfloat16]
if REASON is None and bindings.constant("has_float16"):
    DTYPES.append(torch.float16)
# Of the largest result: roundings of queries, weights and results, and errors of float32 sums.
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SCALE = 0.2
# heads, latent, nope, rope, v, block size: keys read in place, and keys that must be gathered.
IN_PLACE, GATHERED = (16, 64, 32, 32, 32, 16), (5, 32, 20, 8, 12, 4)


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert (got.double() - exact.double()).abs().max() <= NEAR[dtype] * exact.abs().max()


# ---- latent attention ---------------------------------------------------------------------

# Of latents in FP8; they have the model's type without one.
STORED = pytest.mark.parametrize("scale", [None, torch.tensor([0.37])], ids=["stored_alike", "fp8"])


class Sequences:
    """Contexts in a shuffled pool, with NaN behind them; the last tokens of each are queries.

    Args:
        scale: [1] of latents in FP8; they have the type of the queries if None.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        scale: torch.Tensor | None = None,
    ) -> None:
        heads, rank, nope, rope, v, self.block = sizes
        self.lengths = lengths
        counts = [-(-context // self.block) for context, _ in lengths]
        free = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(0)).tolist()
        self.blocks = [[free.pop() for _ in range(n)] for n in counts]
        pool = torch.full((sum(counts) + 3, self.block, rank + rope), float("nan"))
        for i, (context, _) in enumerate(lengths):
            slots = torch.tensor(self.blocks[i])[:, None] * self.block + torch.arange(self.block)
            pool.flatten(0, 1)[slots.flatten()[:context]] = random(context, rank + rope, seed=i)
        stored = pool.to(dtype) if scale is None else quantise(pool, scale, torch.float8_e4m3fn)
        self.cache = LatentCacheTensor(stored, scale)
        total = sum(queries for _, queries in lengths)
        self.q = random(total, heads, nope + rope, dtype=dtype, seed=50)
        self.up = (random(heads, nope + v, rank, seed=51) / rank**0.5).to(dtype)

    def metadata(self, which: slice = slice(None)) -> AttentionMetadata:
        chosen = list(zip(self.lengths, self.blocks, strict=True))[which]
        parts = [Part(queries, context - queries, blocks) for (context, queries), blocks in chosen]
        return attention_metadata(parts, self.block, torch.device("cpu"))

    def run(self) -> torch.Tensor:
        return mla.mla_attention(self.q, self.cache, self.up, self.metadata(), SCALE)

    def exact(self) -> torch.Tensor:
        scale = 1.0 if self.cache.scale is None else self.cache.scale.double()
        cache = LatentCacheTensor(self.cache.latent.double() * scale)
        args = self.q.double(), cache, self.up.double(), self.metadata(), SCALE
        return torch_mla.mla_attention(*args)


@STORED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [IN_PLACE, GATHERED], ids=["in_place", "gathered"])
def test_latent_attention(
    dtype: torch.dtype, sizes: tuple[int, ...], scale: torch.Tensor | None
) -> None:
    lengths = [(40, 1), (600, 3), (5, 5), (140, 40), (1, 1)]
    batch = Sequences(lengths, sizes, dtype, scale)
    assert_near(batch.run(), batch.exact(), dtype)


@pytest.mark.parametrize("heads", [1, 130])
def test_latent_attention_of_few_and_of_many_heads(heads: int) -> None:
    batch = Sequences([(9, 2), (130, 1)], (heads, *GATHERED[1:]), torch.float32)
    assert_near(batch.run(), batch.exact(), torch.float32)


@STORED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [IN_PLACE, GATHERED], ids=["in_place", "gathered"])
def test_a_query_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, sizes: tuple[int, ...], scale: torch.Tensor | None
) -> None:
    """Alone or in a batch, among its sequence's queries or as the only one, on any threads."""
    batch = Sequences([(1100, 1), (700, 18), (12, 12)], sizes, dtype, scale)
    everything = batch.run()
    torch.set_num_threads(3)
    assert torch.equal(batch.run(), everything)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        begin = 0
        for i, (context, queries) in enumerate(batch.lengths):
            end = begin + queries
            own = batch.metadata(slice(i, i + 1))
            part = [Part(1, context - 1, batch.blocks[i])]
            last = attention_metadata(part, batch.block, torch.device("cpu"))
            for rows, metadata in ((slice(begin, end), own), (slice(end - 1, end), last)):
                got = mla.mla_attention(batch.q[rows], batch.cache, batch.up, metadata, SCALE)
                assert torch.equal(got, everything[rows])
            begin = end


def test_rows_behind_the_last_sequence_are_zero() -> None:
    batch = Sequences([(9, 2)], GATHERED, torch.float32)
    padded = torch.cat((batch.q, batch.q))
    out = mla.mla_attention(padded, batch.cache, batch.up, batch.metadata(), SCALE)
    assert torch.equal(out[:2], batch.run())
    assert not out[2:].any()


def test_a_block_beyond_the_cache_is_refused() -> None:
    batch = Sequences([(9, 2), (3, 1)], GATHERED, torch.float32)
    metadata = batch.metadata()
    metadata.block_tables[1, 0] = 1000
    with pytest.raises(IndexError, match=r"sequence 1 has context length 3.*1000"):
        mla.mla_attention(batch.q, batch.cache, batch.up, metadata, SCALE)
    with pytest.raises(ValueError, match="do not fit together"):
        mla.mla_attention(batch.q, batch.cache, batch.up[1:], metadata, SCALE)


@STORED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents_are_written_to_their_slots(dtype: torch.dtype, scale: torch.Tensor | None) -> None:
    """Those of FP8 are saturated, and NaN stays NaN."""
    latent, fused = random(4, 30, dtype=dtype) * 10, random(4, 2, 7, dtype=dtype, seed=1)
    latent[0, 3], latent[2, 29] = 1e4, float("nan")
    slots = torch.tensor([9, -1, 2, 0])
    stored = dtype if scale is None else torch.float8_e4m3fn
    pools = [torch.zeros(3, 4, 37).to(stored) for _ in range(2)]
    caches = [LatentCacheTensor(pool, scale) for pool in pools]
    for op, cache in zip((mla.mla_cache_write, torch_mla.mla_cache_write), caches, strict=True):
        op(latent, fused[:, 1], cache, slots)
    assert torch.equal(*(pool.float().nan_to_num(-1.0) for pool in pools))
    assert pools[0].float().isnan().sum() == 1
    slots[2] = 12
    with pytest.raises(IndexError, match="slot 12 lies beyond a cache of 3 blocks of 4"):
        mla.mla_cache_write(latent, fused[:, 0], caches[0], slots)


def test_latents_in_8_bits_need_their_scale() -> None:
    batch = Sequences([(9, 2)], GATHERED, torch.float32, torch.tensor([0.37]))
    batch.cache = LatentCacheTensor(batch.cache.latent)
    with pytest.raises(ValueError, match="mla_attention do not fit together"):
        batch.run()
    latent = random(2, 32)
    with pytest.raises(ValueError, match="mla_cache_write do not fit together"):
        mla.mla_cache_write(latent, random(2, 8), batch.cache, torch.tensor([0, 1]))


# ---- routing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routing", "biased"),
    [
        (Routing(64, 6, "softmax"), False),
        (Routing(160, 6, "softmax", 8, 3, scaling=16.0), False),
        (Routing(256, 8, "sigmoid", 8, 4, "top2_sum", True, 2.5), True),
        (Routing(7, 3, "sigmoid", renormalize=True), True),
        (Routing(6, 6, "softmax", 3, 3), False),
    ],
    ids=["v2_lite", "v2", "v3", "odd", "all"],
)
def test_routing(routing: Routing, biased: bool) -> None:
    logits = random(70, routing.num_experts)
    bias = random(routing.num_experts, seed=1) if biased else None
    weights, ids = moe.moe_route(logits, bias, routing)
    wide = None if bias is None else bias.double()
    exact_weights, exact_ids = torch_moe.moe_route(logits.double(), wide, routing)
    order, exact_order = ids.long().sort(dim=1), exact_ids.sort(dim=1)
    assert torch.equal(order.values, exact_order.values)
    got = weights.gather(1, order.indices).double()
    exact = exact_weights.gather(1, exact_order.indices)
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-7)
    torch.set_num_threads(3)
    assert torch.equal(moe.moe_route(logits, bias, routing)[0], weights)
    assert torch.equal(moe.moe_route(logits[9:11], bias, routing)[0], weights[9:11])


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.zeros(2, 40)
    logits[1, [7, 30, 31]] = 1.0
    logits[1, 5] = float("nan")
    _, ids = moe.moe_route(logits, None, Routing(40, 4, "sigmoid"))
    assert ids.tolist() == [[0, 1, 2, 3], [7, 30, 31, 0]]
    grouped = Routing(40, 3, "sigmoid", 10, 2)
    assert moe.moe_route(logits[:1], None, grouped)[1].tolist() == [[0, 1, 2]]


# ---- experts ------------------------------------------------------------------------------

EXPERTS, HIDDEN, INTER, TOP_K = 8, 104, 44, 3


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    w13 = random(EXPERTS, 2 * INTER, HIDDEN, seed=1) / HIDDEN**0.5
    return w13.to(dtype), (random(EXPERTS, HIDDEN, INTER, seed=2) / INTER**0.5).to(dtype)


def visits(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Among the chosen experts is one of another rank."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(num_tokens, EXPERTS + 1, generator=generator).argsort(dim=1)[:, :TOP_K]
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    return random(num_tokens, HIDDEN, dtype=dtype), weights, ids.int().contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 2, 19, 300])
def test_experts(dtype: torch.dtype, num_tokens: int) -> None:
    w13, w2 = matrices(dtype)
    x, weights, ids = visits(num_tokens, dtype)
    got = moe.moe_experts(x, w13, w2, weights, ids, 1)
    assert got.shape == x.shape
    if num_tokens:
        wide = x.double(), w13.double(), w2.double()
        assert_near(got, torch_moe.moe_experts(*wide, weights, ids, 1), dtype)
    assert torch.equal(moe.moe_experts(x, w13, w2, weights, ids.long(), 1), got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    w13, w2 = matrices(dtype)
    x, weights, ids = visits(1100, dtype)  # more than are packed at a time
    everything = moe.moe_experts(x, w13, w2, weights, ids)
    torch.set_num_threads(3)
    assert torch.equal(moe.moe_experts(x, w13, w2, weights, ids), everything)
    for rows in (slice(1), slice(2, 5), slice(1090, 1100), slice(100, 200)):
        got = moe.moe_experts(x[rows], w13, w2, weights[rows], ids[rows])
        assert torch.equal(got, everything[rows])


def test_a_shared_expert_is_left_to_others() -> None:
    """On a CPU its products are faster alone; if it is routed anyway, torch does that."""
    for has_shared, function in ((0, moe.moe_route), (1, torch_moe.moe_route)):
        ops = OpTable(cpu_platform(), OPS)
        assert ops.resolve("moe_route", torch.float32, has_shared=has_shared) is function


def test_impossible_choices_are_refused() -> None:
    w13, w2 = matrices(torch.float32)
    x, weights, ids = visits(3, torch.float32)
    ids[1, 2] = -1
    with pytest.raises(IndexError, match="token 1 has experts"):
        moe.moe_experts(x, w13, w2, weights, ids)
    with pytest.raises(ValueError, match="do not fit together"):
        moe.moe_experts(x, w13, w2, weights[:2], ids)


# ---- between them -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add(dtype: torch.dtype) -> None:
    x, y = random(3, 37, dtype=dtype), random(3, 37, dtype=dtype, seed=1)
    expected = torch_elementwise.add(x.clone(), y)
    assert elementwise.add(x, y) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_each_head_is_rotated_where_it_lies(interleaved: bool) -> None:
    heads, table = random(5, 3, 48), random(9, 32, seed=1)
    q, k, positions = heads[..., 16:], random(5, 1, 80, seed=2)[..., 40:72], torch.arange(5)
    got = elementwise.rope(positions, q, k, table, interleaved)
    exact = torch_elementwise.rope(positions, q, k, table, interleaved)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other)
