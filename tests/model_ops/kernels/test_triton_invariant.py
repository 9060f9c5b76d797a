"""With `--batch-invariant` a row has the same bits alone and in any batch, however it got there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import test_triton_attention as heads
import test_triton_mla as latents
import test_triton_moe as experts
import test_triton_quant_experts as codes
import test_triton_rope_cache as rope_tests
import torch
from aot_case import PLATFORMS
from model_ops.batches import Part, attention_metadata

from atom.environment import triton_is_interpreted
from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.kernels.triton import activation, rms_norm
from atom.model_ops.kernels.triton.attention import fixed_splits, invariant_attention, rope_cache
from atom.model_ops.kernels.triton.mla import invariant_mla, mla_rope_cache
from atom.model_ops.kernels.triton.products import (
    invariant_experts,
    linear,
    moe_experts,
    moe_splits,
    norm_quantise,
    quant_experts,
    quant_splits,
)
from atom.model_ops.kernels.triton.products.moe_route import moe_route
from atom.model_ops.kernels.triton.products.quant_layout import prepare_tiles
from atom.model_ops.quant.rounding import InputRounding
from atom.model_ops.quant.weights import Activations
from atom.model_ops.routing import Routing
from atom.platform import Platform, cpu_platform, current_platform

BF16, FP32 = torch.bfloat16, torch.float32
Experts = Callable[..., torch.Tensor]
Rows = Callable[[AttentionMetadata, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two splits in a context of 90 tokens; where kernels are interpreted, ordered sums."""
    monkeypatch.setattr(fixed_splits, "SPLIT_KEYS", 64)
    if not triton_is_interpreted():
        yield
        return
    from interpreter import ordered_products

    with ordered_products():
        yield


def kind_on(device: torch.device, turn: int = 0) -> str:
    """Whose tiles run here; interpreted, both do in turn."""
    return ("cuda", "rocm")[turn % 2] if device.type == "cpu" else current_platform().kind


def numbers(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


class TestProducts:
    """70 rows of x are two tiles of which the second is nearly empty."""

    @pytest.mark.parametrize("dtype", [BF16, FP32])
    @pytest.mark.parametrize("splits", [1, 2])
    def test_a_row_does_not_depend_on_its_batch(
        self, splits: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = 130
        monkeypatch.setattr(quant_splits, "_LEAST_INPUTS", inputs // splits)
        x = numbers(70, inputs, device=device, dtype=dtype)
        weight = numbers(40, inputs, device=device, dtype=dtype)
        bias = numbers(40, device=device, dtype=dtype)
        kind = kind_on(device, splits)
        multiply = partial(linear.product, kind, weight=weight, bias=bias, out_dtype=dtype)
        whole = multiply(x)
        exact = x.double() @ weight.double().T + bias.double()
        error = (whole.double() - exact).abs().max() / exact.abs().max()
        assert error < (1e-5 if dtype is FP32 else 1e-2)
        for rows in ([69], [5, 64], [8, 1, 66, 2, 40], list(range(17, 0, -1))):
            assert torch.equal(multiply(x[rows]), whole[rows])
        # Splits are added in the program, too, where there are enough of those.
        monkeypatch.setattr(linear, "BUSY", {})
        assert torch.equal(multiply(x[:2]), whole[:2])

    def test_logits_are_the_sums(self, device: torch.device) -> None:
        x, weight = numbers(3, 64, device=device), numbers(80, 64, device=device)
        sums = linear.logits(x, weight)
        assert sums.dtype is FP32
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(sums.double(), expected, atol=1e-4, rtol=0)
        assert torch.equal(linear.linear(x, weight, None), sums.to(BF16))

    def test_of_any_strides(self, device: torch.device) -> None:
        """As latent attention has them: heads between tokens, and weights read across."""
        x, weight = numbers(5, 3, 48, device=device), numbers(3, 24, 40, device=device)
        out = x.new_empty(5, 3, 40)
        by_head = x[..., :24].transpose(0, 1)
        linear.matrix_products(
            kind_on(device), by_head, weight.transpose(1, 2), out.transpose(0, 1)
        )
        expected = torch.einsum("tbk,bkn->tbn", x[..., :24].double(), weight.double())
        torch.testing.assert_close(out.double(), expected, atol=0.1, rtol=1e-2)


CONTEXT = 90
SEQUENCES = 2
# Who computes which rows of a sequence beside whom: (sequence, first row, end) of each.
BATCHES = {
    "alone": [(0, 89, 90)],
    "in two": [(1, 20, 21), (0, 80, 81)],
    "in another order": [(1, 64, 65), (0, 63, 64)],
    "verified": [(1, 70, 74), (0, 61, 65)],
    "other numbers of drafts": [(0, 70, 86), (1, 7, 8)],
    "after a prefix": [(0, 40, 90)],
    "a chunk beside others": [(1, 89, 90), (0, 33, 67)],
}


def rows_of(pieces: list[tuple[int, int, int]]) -> list[int]:
    return [s * CONTEXT + row for s, begin, end in pieces for row in range(begin, end)]


def metadata_of(
    pieces: list[tuple[int, int, int]], block_size: int, device: torch.device
) -> AttentionMetadata:
    """Sequences in scattered blocks of one pool, the same ones in every batch."""
    count = -(-CONTEXT // block_size)
    ids = list(range(SEQUENCES * count))
    random.Random(0).shuffle(ids)
    parts = [Part(end - begin, begin, ids[s * count : (s + 1) * count]) for s, begin, end in pieces]
    return attention_metadata(parts, block_size, device)


def check_rows(attend: Rows, q: torch.Tensor, block_size: int) -> torch.Tensor:
    """All prompts at once, whose rows must come out again in each of BATCHES."""
    whole = [(s, 0, CONTEXT) for s in range(SEQUENCES)]
    expected = attend(metadata_of(whole, block_size, q.device), q)
    for name, pieces in BATCHES.items():
        rows = rows_of(pieces)
        found = attend(metadata_of(pieces, block_size, q.device), q[rows])
        assert torch.equal(found, expected[rows]), name
    return expected


class TestHeads:
    @pytest.mark.parametrize(("window", "storage"), [(None, None), (40, torch.float8_e4m3fn)])
    def test_a_query_does_not_depend_on_its_batch(
        self, window: int | None, storage: torch.dtype | None, device: torch.device
    ) -> None:
        if storage is not None:
            heads.skip_unless_converted(storage)
        blocks = SEQUENCES * -(-CONTEXT // 16)
        cache = heads.random_cache((blocks, 16, 1, 32), storage or BF16, device)
        q = numbers(SEQUENCES * CONTEXT, 2, 32, device=device)
        decode, prefill = (
            invariant_attention.paged_attention,
            invariant_attention.prefill_attention,
        )

        def attend(metadata: AttentionMetadata, q: torch.Tensor) -> torch.Tensor:
            op = decode if metadata.max_seqlen_q <= 16 else prefill
            return op(q, cache, metadata, 0.2, window)

        check_rows(attend, q, 16)

    def test_rounds_are_the_whole(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = heads.random_cache((20, 16, 1, 32), BF16, device)
        metadata = heads.metadata_of([(90, 3), (40, 2)], 16, 20, device)
        q = numbers(5, 2, 32, device=device)
        whole = invariant_attention.paged_attention(q, cache, metadata, 0.2, None)
        monkeypatch.setattr(fixed_splits, "_ROUND_BYTES", 4 * q.numel())
        in_rounds = invariant_attention.paged_attention(q, cache, metadata, 0.2, None)
        assert torch.equal(in_rounds, whole)

    @pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 100), (False, 5)])
    def test_equals_the_definition(
        self, causal: bool, window: int | None, device: torch.device
    ) -> None:
        names = {True: "paged_attention", False: "block_attention"}
        attend = getattr(invariant_attention, names[causal])
        sequences = [(140, 3), (64, 1), (65, 2)]
        heads.check(attend, device, sequences, heads=(6, 2), window=window, causal=causal)

    def test_rows_of_no_sequence_are_zero(self, device: torch.device) -> None:
        metadata = heads.metadata_of([(70, 1), (2, 2)], 16, 8, device)
        metadata.context_lens[1:] = 0
        cache = heads.random_cache((8, 16, 1, 32), BF16, device)
        q = numbers(3, 1, 32, device=device)
        out = invariant_attention.paged_attention(q, cache, metadata, 0.2, None)
        assert torch.equal(out[1:], torch.zeros_like(out[1:]))


class TestLatents:
    SIZES = latents.Sizes(heads=2, rank=32, nope=8, rope=8, v=12, block_size=16)

    def test_a_query_does_not_depend_on_its_batch(self, device: torch.device) -> None:
        sizes = self.SIZES
        blocks = SEQUENCES * -(-CONTEXT // sizes.block_size)
        pool = numbers(blocks, sizes.block_size, sizes.rank + sizes.rope, device=device)
        q = numbers(SEQUENCES * CONTEXT, sizes.heads, sizes.nope + sizes.rope, device=device)
        up_proj = numbers(sizes.heads, sizes.nope + sizes.v, sizes.rank, device=device)

        def attend(metadata: AttentionMetadata, q: torch.Tensor) -> torch.Tensor:
            kind = kind_on(device)
            return invariant_mla.attend(kind, q, LatentCacheTensor(pool), up_proj, metadata, 0.1)

        check_rows(attend, q, sizes.block_size)

    @pytest.mark.parametrize(
        ("op", "dtype", "storage"),
        [
            (invariant_mla.mla_decode, FP32, None),
            (invariant_mla.mla_prefill, BF16, torch.float8_e4m3fn),
        ],
    )
    def test_equals_the_definition(
        self,
        op: Callable[..., torch.Tensor],
        dtype: torch.dtype,
        storage: torch.dtype | None,
        device: torch.device,
    ) -> None:
        if storage is not None:
            heads.skip_unless_converted(storage)
        lengths = [(70, 3), (64, 1), (3, 3)]
        latents.check(op, latents.make_batch(lengths, device, latents.RAGGED, dtype, storage))


class TestExperts:
    """Few tokens, whose inputs normal mode splits, and so many that tiles are larger."""

    @pytest.fixture(autouse=True)
    def split_in_normal_mode(self, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        monkeypatch.setattr(moe_splits, "_LEAST_INPUTS", 64)
        kind = kind_on(device)
        for module in (moe_experts, quant_experts, invariant_experts):
            monkeypatch.setattr(module, "current_platform", lambda: Platform(kind, "", True))
        monkeypatch.setattr(moe_splits, "BUSY", {kind: 64})

    def check(self, usual: Experts, op: Experts, problem: experts.Problem) -> None:
        x, w13, w2, weights, ids = problem

        def rows(op: Experts, which: list[int]) -> torch.Tensor:
            return op(x[which], w13, w2, weights[which], ids[which])

        whole = rows(op, list(range(len(x))))
        for which in ([17], [3, 1], [5, 2, 9, 16, 0, 1]):
            assert torch.equal(rows(op, which), whole[which])
        # What the mode leaves out, here, too.
        assert not torch.equal(rows(usual, [17]), whole[17:])

    def test_of_numbers(self, device: torch.device) -> None:
        problem = experts.problem(18, 2, device, FP32, hidden=160, inter=32)
        self.check(moe_experts.moe_experts, invariant_experts.moe_experts, problem)

    def test_of_codes(self, device: torch.device) -> None:
        form, scales = codes.WEIGHT_ONLY["int4 group 32"]
        x, _, _, weights, ids = experts.problem(18, 2, device, FP32, hidden=codes.HIDDEN)
        platform = current_platform() if device.type != "cpu" else cpu_platform()
        tiles = [
            prepare_tiles(codes.on(device, codes.random_weights(form, scales, *sizes)), platform)
            for sizes in ((2 * codes.INTER, codes.HIDDEN, 1), (codes.HIDDEN, codes.INTER, 2))
        ]
        problem = x, *tiles, weights, ids
        self.check(quant_experts.quant_experts, invariant_experts.quant_experts, problem)


ROUTING = Routing(16, 4, "sigmoid", 4, 2, "top2_sum", True, 2.5)


def rotated_and_cached(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x [T, 96] as heads and as latents: queries, and what the caches have then."""
    slots = torch.arange(len(x), device=x.device)
    positions = torch.full_like(slots, 5)
    table = numbers(8, 32, device=x.device, dtype=FP32)
    heads = KVCacheTensor(*x.new_zeros(2, 2, 16, 1, 32))
    rows = x.view(-1, 3, 32).split(1, 1)
    q = rope_cache.rope_and_cache(
        positions, *rows, table, False, heads, slots, *rope_tests.ONE_KERNEL
    )
    latents = LatentCacheTensor(x.new_zeros(2, 16, 64))
    q_latent = mla_rope_cache.mla_rope_and_cache(
        positions, rows[0], x[:, 32:64], x[:, 64:], table, False, latents, slots,
        *rope_tests.ONE_KERNEL,
    )  # fmt: skip
    caches = heads.key, heads.value, latents.latent
    return q, q_latent, *(cache.flatten(0, 1)[: len(x)] for cache in caches)


def summed_and_quantised(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rounding = InputRounding(Activations("fp8", 128), None)
    out, total = norm_quantise.add_rms_norm_quantise(
        x, x * 0.3, x[0] * 0 + 1, 1e-5, rounding, rms_norm.add_rms_norm
    )
    assert out.scale is not None
    return out.numbers.float(), out.scale, total


OTHERS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "rms_norm": lambda x: (rms_norm.rms_norm(x, x[0] * 0 + 1, 1e-5),),
    "add_rms_norm": lambda x: rms_norm.add_rms_norm(x, x * 0.3, x[0] * 0 + 1, 1e-5),
    "rms_norm_pair": lambda x: rms_norm.rms_norm_pair(
        x, x[0, :64] * 0 + 1, x[0, 64:] * 0 + 2, 1e-5, rms_norm.rms_norm
    ),
    "add_rms_norm_quantise": summed_and_quantised,
    "silu_and_mul": lambda x: (activation.silu_and_mul(x),),
    "moe_route": lambda x: moe_route(x[:, :16].float(), None, ROUTING),
    "rope_and_cache": rotated_and_cached,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_row_by_row(name: str, device: torch.device) -> None:
    x = numbers(17, 96, device=device)
    whole = OTHERS[name](x)
    for rows in ([16], [4, 2], [9, 0, 1, 15, 3]):
        for found, expected in zip(OTHERS[name](x[rows]), whole, strict=True):
            assert torch.equal(found, expected[rows])


def test_splits_lie_where_the_keys_do() -> None:
    assert [fixed_splits.num_splits(n) for n in (0, 1, 64, 65, 150)] == [1, 1, 1, 2, 3]
    # A window's keys begin anywhere in a split.
    assert fixed_splits.num_seen_splits(1 << 20, 64, 1) == 2
    assert fixed_splits.num_seen_splits(1 << 20, 65, 16) == 3
    assert fixed_splits.num_seen_splits(100, 65, 16) == 2


def test_one_tile_for_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched differs in its grid alone."""
    launched: list[dict[str, object]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **constants: launched.append({**constants})

    monkeypatch.setattr(linear, "_product", Recorder())
    for platform in PLATFORMS.values():
        launched.clear()
        for tokens in (1, 17, 64, 65, 3000):
            x, weight = torch.empty(tokens, 512), torch.empty(4096, 512)
            linear.product(platform.kind, x, weight, None, FP32)
        assert len(launched) == 5
        assert launched[0]
        assert all(each == launched[0] for each in launched)
