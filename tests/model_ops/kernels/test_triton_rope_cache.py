"""Rotation and cache write in one launch, through Triton, against float64."""

from __future__ import annotations

import pytest
import torch
from fake_aiter import FakeAiter
from test_triton_attention import FP8, skip_unless_converted
from test_triton_elementwise import assert_near, random

from atom.model_ops.attention.metadata import KVCacheTensor, LatentCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.packed_cache import PackedLayout
from atom.model_ops.kernels.torch import attention, elementwise, mla
from atom.model_ops.kernels.triton.attention.rope_cache import (
    refuses,
    refuses_packed,
    rope_and_cache,
    rope_and_cache_packed,
)
from atom.model_ops.kernels.triton.mla.mla_rope_cache import mla_rope_and_cache
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import Platform

BF16, FP32 = torch.bfloat16, torch.float32
BLOCKS, BLOCK_SIZE = 4, 16
SLOTS = torch.tensor([17, -1, 3 * BLOCK_SIZE + 5, 0])
KEPT = [0, 2, 3]  # tokens with a slot
POSITIONS = torch.tensor([0, 7, 49, 20])
TABLE = 50


def not_called(*_: object) -> None:
    pytest.fail("the kernel does the work of this op")


ONE_KERNEL = (not_called, not_called)


def table_of(rotary_dim: int) -> torch.Tensor:
    return random(TABLE, rotary_dim, dtype=FP32, device=torch.device("cpu"), seed=3)


class TestHeads:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim", "rotary_dim", "dtype"),
        [(9, 3, 64, 64, BF16), (3, 2, 96, 40, torch.float16), (1, 1, 6, 6, FP32)],
    )
    def test_rotated_queries_and_what_is_cached(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        dtype: torch.dtype,
        interleaved: bool,
        device: torch.device,
    ) -> None:
        fused = random(4, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
        q, k, v = fused.split_with_sizes([heads, kv_heads, kv_heads], 1)
        table = table_of(rotary_dim).to(device)
        pools = torch.full((2, BLOCKS, BLOCK_SIZE, kv_heads, head_dim), 7.0, dtype=dtype)
        cache = KVCacheTensor(*pools.to(device))
        positions, slots = POSITIONS.to(device), SLOTS.to(device)
        got = rope_and_cache(positions, q, k, v, table, interleaved, cache, slots, *ONE_KERNEL)
        exact = elementwise.rope(positions, q.double(), k.double(), table.double(), interleaved)
        assert_near(got, exact[0], dtype)
        key, value = (x.flatten(0, 1) for x in (cache.key, cache.value))
        written = slots[KEPT]
        assert_near(key[written], exact[1][KEPT], dtype)
        assert torch.equal(value[written], v[KEPT])
        for pool in (key, value):
            pool[written] = 7.0
            assert bool((pool == 7).all())

    @pytest.mark.parametrize("is_packed", [False, True])
    @pytest.mark.parametrize("name", [None, *FP8])
    def test_both_layouts_hold_what_two_ops_leave(
        self, name: str | None, is_packed: bool, device: torch.device
    ) -> None:
        """Rounded to the model's type first; in 8 bits saturated, too."""
        storage = BF16 if name is None else FP8[name]
        if name is not None:
            skip_unless_converted(storage)
        scales = [torch.tensor([x], device=device) for x in (0.02, 0.7)] if name else []
        fused = random(4, 6, 128, dtype=BF16, device=device) * 4
        fused[2, 2, 5], fused[3, 4, 1] = 1e4, -1e4
        q, k, v = fused.split(2, 1)
        table = table_of(128).to(device)
        positions, slots = POSITIONS.to(device), SLOTS.to(device)
        caches = []
        for _ in range(2):
            # The torch op writes slot -1 to a spare block on a GPU.
            pools = torch.zeros(2, BLOCKS + 1, BLOCK_SIZE, 2, 128, device=device).to(storage)
            caches.append(KVCacheTensor(pools[0], pools[1], *scales))
        run = rope_and_cache_packed if is_packed else rope_and_cache
        run(positions, q, k, v, table, False, caches[0], slots, *ONE_KERNEL)
        parts = elementwise.rope, attention.kv_cache_write
        elementwise.rope_and_cache(positions, q, k, v, table, False, caches[1], slots, *parts)
        written = slots[KEPT]
        theirs = [x.float().flatten(0, 1)[written] for x in (caches[1].key, caches[1].value)]
        if is_packed:
            ours = list(PackedLayout().rows(caches[0], written, FP32))
            factors = [float(s) for s in scales] or [1.0, 1.0]
            theirs = [x * f for x, f in zip(theirs, factors, strict=True)]
        else:
            ours = [x.float().flatten(0, 1)[written] for x in (caches[0].key, caches[0].value)]
        # A rotated key may be rounded to the other neighbour.
        torch.testing.assert_close(ours[0], theirs[0], rtol=2**-3 if name else 2**-7, atol=1e-2)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
        assert sum(int(x.float().count_nonzero()) for x in (caches[0].key, caches[0].value)) == sum(
            int(x[:BLOCKS].float().count_nonzero()) for x in (caches[1].key, caches[1].value)
        )

    def test_far_slots_and_no_tokens(self, device: torch.device) -> None:
        blocks = 2**31 // (16 * 2 * 64) + 2
        pool = torch.empty(blocks, 16, 2, 64, dtype=BF16, device=device)
        q = random(2, 2, 64, dtype=BF16, device=device)
        still = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1).to(device)
        at = torch.zeros(2, dtype=torch.int64, device=device)
        slots = torch.tensor([blocks * 16 - 1, 0], device=device)
        cache = KVCacheTensor(pool, pool)
        got = rope_and_cache(at, q, q, q, still, False, cache, slots, *ONE_KERNEL)
        assert torch.equal(got, q)
        assert torch.equal(torch.stack((pool[-1, -1], pool[0, 0])), q)
        none = rope_and_cache(
            at[:0], q[:0], q[:0], q[:0], still, False, cache, slots[:0], *ONE_KERNEL
        )
        assert none.shape == (0, 2, 64)

    def test_what_does_not_fit_is_named(self, device: torch.device) -> None:
        cache = KVCacheTensor(*torch.zeros(2, 1, 16, 2, 8, device=device))
        x, table = torch.zeros(3, 2, 8, device=device), torch.zeros(5, 8, device=device)
        at = torch.zeros(3, dtype=torch.int64, device=device)
        for q, k, slots in ((x[..., :4], x, at), (x, x[:2], at), (x, x, at[:2])):
            with pytest.raises(ValueError, match="rope_and_cache wants"):
                rope_and_cache(at, q, k, x, table, False, cache, slots, *ONE_KERNEL)

    @pytest.mark.parametrize("op", ["rope", "kv_cache_write"])
    def test_another_kernel_for_a_part_is_honoured(
        self, op: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        query = OpQuery(Platform("cuda", "sm90", True), BF16, {}, BF16)
        assert refuses(query) is None
        monkeypatch.setenv(f"ATOM_OP_{op.upper()}", "torch")
        reason = refuses(query)
        assert reason == f"does the work of {op}, and ATOM_OP_{op.upper()}=torch"
        assert refuses_packed(query) is not None

    @pytest.mark.parametrize("head_dim", [128, 64])
    def test_the_cache_is_packed_where_all_of_its_ops_are(self, head_dim: int) -> None:
        ops = "kv_cache_write", "rope_and_cache", "paged_attention", "prefill_attention"
        shape = {"num_heads": 4, "num_kv_heads": 4, "head_dim": head_dim, "block_size": 16}
        with probe.replaced(FakeAiter().library):
            table = OpTable(Platform("rocm", "gfx942", True), OPS)
            _, chosen, *_ = table.resolve_together(
                ops, BF16, BF16, **shape, num_blocks=9, sliding_window=0
            )
        assert chosen is (rope_and_cache_packed if head_dim == 128 else rope_and_cache)


class TestLatents:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        ("heads", "nope", "rope", "rank", "dtype", "name"),
        [
            (3, 24, 8, 40, BF16, None),
            (9, 128, 64, 512, torch.float16, None),
            (2, 0, 8, 16, FP32, None),
            (2, 16, 16, 32, BF16, "e4m3fn"),
        ],
    )
    def test_rotated_queries_and_what_is_cached(
        self,
        heads: int,
        nope: int,
        rope: int,
        rank: int,
        dtype: torch.dtype,
        name: str | None,
        interleaved: bool,
        device: torch.device,
    ) -> None:
        storage = dtype if name is None else FP8[name]
        if name is not None:
            skip_unless_converted(storage)
        scale = None if name is None else torch.tensor([0.02], device=device)
        q = random(4, heads, nope + rope, dtype=dtype, device=device)
        latent = random(4, rank, dtype=dtype, device=device, seed=1)
        # As it leaves the product with the latent beside it.
        k_rope = random(4, rank + rope, dtype=dtype, device=device, seed=2)[:, rank:]
        table = table_of(rope).to(device)
        pool = torch.zeros(BLOCKS, BLOCK_SIZE, rank + rope, device=device).to(storage)
        positions, slots = POSITIONS.to(device), SLOTS.to(device)
        cache = LatentCacheTensor(pool, scale)
        got = mla_rope_and_cache(
            positions, q, latent, k_rope, table, interleaved, cache, slots, *ONE_KERNEL
        )
        wide = q[..., nope:].double(), k_rope[:, None].double()
        exact_q, exact_k = elementwise.rope(positions, *wide, table.double(), interleaved)
        assert_near(got, torch.cat((q[..., :nope].double(), exact_q), dim=-1), dtype)
        written = pool.float().flatten(0, 1)[slots[KEPT]]
        exact = torch.cat((latent.double(), exact_k[:, 0]), dim=-1)[KEPT]
        if scale is None:
            assert_near(written.to(dtype), exact, dtype)
        else:
            limit = torch.finfo(storage).max
            exact = (exact / scale.double()).clamp(-limit, limit)
            torch.testing.assert_close(written.double(), exact, rtol=2**-4, atol=2**-9)
            assert float(written.abs().max()) == float(exact.abs().max().to(FP32).to(storage))
        assert int(pool.float().count_nonzero()) == int(written.count_nonzero())

    def test_it_leaves_what_two_ops_leave(self, device: torch.device) -> None:
        q = random(4, 2, 24, dtype=FP32, device=device)
        latent, k_rope = q[:, 0, :16], q[:, 1, :8]
        table, positions, slots = (x.to(device) for x in (table_of(8), POSITIONS, SLOTS))
        # The torch op writes slot -1 to a spare block on a GPU.
        caches = [LatentCacheTensor(torch.zeros(5, 16, 24, device=device)) for _ in range(2)]
        parts = elementwise.rope, mla.mla_cache_write
        given = positions, q, latent, k_rope, table, True
        ours = mla_rope_and_cache(*given, caches[0], slots, *ONE_KERNEL)
        theirs = mla.mla_rope_and_cache(*given, caches[1], slots, *parts)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(caches[0].latent[:4], caches[1].latent[:4])
        assert not caches[0].latent[4].any()

    def test_outside_the_table_is_not_a_number(self, device: torch.device) -> None:
        q = torch.ones(1, 1, 12, device=device)
        cache = LatentCacheTensor(torch.zeros(1, 4, 16, device=device))
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        for position in (-1, 5, 2**40):
            at = torch.tensor([position], device=device)
            rows = q[:, 0], q[:, 0, :4]
            table = torch.ones(5, 4, device=device)
            got = mla_rope_and_cache(at, q, *rows, table, False, cache, slots, *ONE_KERNEL)
            assert got[..., 8:].isnan().all()
            assert (got[..., :8] == 1).all()

    def test_what_does_not_fit_is_named(self, device: torch.device) -> None:
        cache = LatentCacheTensor(torch.zeros(1, 4, 16, device=device))
        q, table = torch.zeros(3, 2, 12, device=device), torch.zeros(5, 4, device=device)
        at = torch.zeros(3, dtype=torch.int64, device=device)
        for latent, k_rope in ((q[:2, 0], q[:, 0, :4]), (q[:, 0], q[:, 0, :6])):
            with pytest.raises(ValueError, match="mla_rope_and_cache wants"):
                mla_rope_and_cache(at, q, latent, k_rope, table, False, cache, at, *ONE_KERNEL)
