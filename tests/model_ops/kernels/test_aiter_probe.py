"""What is found of aiter, what is made of what is not, and who agrees on a cache's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from fake_aiter import ENTRY_POINTS, SIGNATURES, DeviationError, FakeAiter, signature
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels import packed_cache, probe
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import (
    PACKED,
    PLAIN,
    Implementation,
    OpTable,
    OpUnavailableError,
    always,
)
from atom.platform import Platform

MI300X = Platform("rocm", "gfx942", True)
BF16 = torch.bfloat16
SLOTS = torch.arange(3)
NORM, SILU = ENTRY_POINTS["rmsnorm2d_fwd"], ENTRY_POINTS["silu_and_mul"]
CACHE_OPS = ("kv_cache_write", "paged_attention", "prefill_attention")
DRAFT = {
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 128,
    "block_size": 16,
    "num_blocks": 70_000,
    "sliding_window": 0,
}


def table(registry: Mapping[str, tuple[Implementation, ...]] = OPS) -> OpTable:
    """aiter's and torch's implementations on an MI300X."""
    chosen = {
        op: tuple(e for e in entries if e.name in ("aiter", "torch"))
        for op, entries in registry.items()
    }
    return OpTable(MI300X, chosen)


def test_adapters_pass_what_the_signatures_take() -> None:
    for name, entry in ENTRY_POINTS.items():
        assert SIGNATURES[name]["module"] == entry.module
        parameters = signature(name).parameters
        positional = entry.positional.split()
        assert list(parameters)[: len(positional)] == positional
        assert set(entry.keywords.split()) <= set(parameters)
        required = {n for n, p in parameters.items() if p.default is p.empty}
        assert required <= set(positional), name


@pytest.mark.skipif(torch.version.hip is not None, reason="aiter may be here")
def test_without_rocm_nothing_is_imported() -> None:
    assert probe.refusal(NORM) == "torch is not built for ROCm"
    with pytest.raises(RuntimeError, match="not built for ROCm"):
        probe.function(NORM)
    ops = table()
    ops.resolve("rms_norm", BF16, size=64)
    assert "not aiter: torch is not built for ROCm" in ops.describe()


@pytest.mark.skipif(torch.version.hip is not None, reason="aiter may be here")
def test_with_rocm_and_without_aiter_the_failed_import_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    try:
        assert probe.refusal(NORM) == ("import aiter: ModuleNotFoundError: No module named 'aiter'")
    finally:
        probe._installed.cache_clear()


@pytest.mark.parametrize(
    "error", [RuntimeError("no\n  GPU"), ImportError("libamdhip64.so"), KeyError("arch")]
)
def test_an_import_that_fails_is_a_reason(error: Exception) -> None:
    attempts = []

    def load(module: str) -> Mapping[str, Any]:
        attempts.append(module)
        raise error

    with probe.replaced(probe.Library(load)):
        ops = table()
        for op in ("rms_norm", "silu_and_mul"):
            ops.resolve(op, BF16, size=64)
        assert f"import aiter: {type(error).__name__}: " in ops.describe()
    assert attempts == ["aiter"]


def test_a_missing_entry_point_is_a_reason() -> None:
    with probe.replaced(FakeAiter(missing=["silu_and_mul"]).library):
        ops = table()
        ops.resolve("silu_and_mul", BF16, size=64)
        assert "this aiter has no aiter.ops.activation.silu_and_mul" in ops.describe()


def _renamed(out: Any, x: Any) -> None: ...
def _needs_more(out: Any, input: Any, swizzle: Any) -> None: ...
def _grown(out: Any, input: Any, limit: float = 0.0, more: int = 1) -> None: ...
def _anything(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_renamed, "takes (out, x), not (out, input)"),
        (_needs_more, "takes (out, input, swizzle), not (out, input)"),
        (_grown, None),
        (_anything, None),
    ],
)
def test_a_changed_entry_point_is_a_reason(function: Any, reason: str | None) -> None:
    library = probe.Library(lambda _: {"silu_and_mul": function})
    with probe.replaced(library):
        found = probe.refusal(SILU)
    assert found is None if reason is None else reason in str(found)


def test_a_lost_keyword_is_a_reason() -> None:
    def gemm_a16w16(A: Any, B: Any, bias: Any = None) -> None: ...

    with probe.replaced(probe.Library(lambda _: {"gemm_a16w16": gemm_a16w16})):
        assert "no parameter otype" in str(probe.refusal(ENTRY_POINTS["gemm_a16w16"]))


def test_types_that_aiter_does_not_compute_in_are_refused() -> None:
    with probe.replaced(FakeAiter().library):
        ops = table()
        ops.resolve("rms_norm", torch.float32, size=64)
        assert "not aiter: computes in bfloat16 or float16, not float32" in ops.describe()
    with probe.replaced(FakeAiter(torch.float32).library):
        ops = table()
        ops.resolve("rms_norm", torch.float32, size=64)
        assert "not aiter" not in ops.describe()


def test_the_fake_notices_deviations() -> None:
    fake = FakeAiter()
    out, x = torch.zeros(3, 4, dtype=BF16), torch.zeros(3, 8, dtype=BF16)
    with probe.replaced(fake.library):
        activate = probe.function(SILU)
    activate(out, x)
    for arguments, keywords, what in (
        ((out,), {}, "missing a required argument"),
        ((out, x), {"limits": 1.0}, "unexpected keyword"),
        ((out, x), {"limit": 1.0}, "limit must be left alone"),
        ((out[:2], x), {}, "must be"),
        ((out, x.float()), {}, "must be of"),
        ((out, torch.zeros(3, 16, dtype=BF16)[:, ::2]), {}, "must be dense"),
    ):
        with pytest.raises(DeviationError, match=what):
            activate(*arguments, **keywords)
    assembly = fake.library.load("aiter.ops.attention")["pa_fwd_asm"]
    with pytest.raises(DeviationError, match="pa_fwd_asm must not be called"):
        assembly(*[None] * 6)


@pytest.mark.parametrize("storage", [BF16, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("block_size", [16, 64])
def test_packing_round_trips(storage: torch.dtype, block_size: int) -> None:
    """Every byte of a pool is some token's in either layout, and a block stays a block."""
    shape = (2, 3, block_size, 2, 128)
    pools = torch.randn(shape).to(storage)
    scales = [torch.ones(1)] * 2 if storage.itemsize == 1 else []
    cache = KVCacheTensor(pools[0], pools[1], *scales)
    slots = torch.arange(3 * block_size)
    rows = packed_cache.PackedLayout().rows(cache, slots, torch.float32)
    x = 16 // storage.itemsize
    again = torch.empty(shape, dtype=storage)
    key, value = rows[0].to(storage), rows[1].to(storage)
    blocks = key.view(3, block_size, 2, 128 // x, x).permute(0, 2, 3, 1, 4)
    packed_cache.packed_key(again[0]).copy_(blocks)
    blocks = value.view(3, block_size // x, x, 2, 128).permute(0, 3, 1, 4, 2)
    packed_cache.packed_value(again[1]).copy_(blocks)
    assert torch.equal(again.view(torch.uint8), pools.view(torch.uint8))
    for part, pool in zip(rows, pools, strict=True):
        for block in range(3):
            tokens = part[block * block_size : (block + 1) * block_size]
            wanted = pool[block].float().flatten().sort().values
            assert torch.equal(tokens.flatten().sort().values, wanted)


def written_by(ops: OpTable, **shape: int) -> str:
    """The name of the entry point, or `torch`, that writes for a draft's layer."""
    write, _, _ = ops.resolve_together(CACHE_OPS, BF16, BF16, **{**DRAFT, **shape})
    fake = FakeAiter()
    pools = torch.zeros(2, 2, 16, 4, 128, dtype=BF16)
    with probe.replaced(fake.library):
        write(pools[0, 0, :3].clone(), pools[1, 0, :3].clone(), KVCacheTensor(*pools), SLOTS)
    return next(iter(fake.names), "torch")


def test_a_draft_with_a_query_head_a_kv_head_is_packed() -> None:
    """However many blocks there are: no assembly kernel is involved."""
    with probe.replaced(FakeAiter().library):
        ops = table()
        assert written_by(ops) == "reshape_and_cache"
        assert "not aiter" not in ops.describe()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"head_dim": 64}, "head_dim=128, not 64"),
        ({"block_size": 32}, "block_size of 16, 64, not 32"),
        ({"sliding_window": 5}, "no sliding_window=5"),
    ],
)
def test_beyond_the_limits_of_gluon_no_aiter_decodes_a_draft(
    shape: dict[str, int], reason: str
) -> None:
    with probe.replaced(FakeAiter().library):
        ops = table()
        assert written_by(ops, **shape) == "reshape_and_cache_flash"
        lines = [line for line in ops.describe().splitlines() if "paged_attention" in line]
        assert " torch " in lines[0]
        assert "one query head a KV head: Gluon's. " in ops.describe()
        assert reason in ops.describe()


def test_without_one_of_its_entry_points_nothing_is_packed() -> None:
    for missing in packed_cache.PACKED_ENTRY_POINTS:
        with probe.replaced(FakeAiter(missing=[missing.name]).library):
            assert written_by(table()) == "reshape_and_cache_flash"


@pytest.mark.parametrize("op", CACHE_OPS)
def test_an_override_of_one_op_keeps_all_plain(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ATOM_OP_{op.upper()}", "torch")
    with probe.replaced(FakeAiter().library):
        ops = table()
        wanted = "torch" if op == "kv_cache_write" else "reshape_and_cache_flash"
        assert written_by(ops) == wanted
        assert "keeps the cache packed, other ops on it keep it plain" in ops.describe()


def test_one_op_alone_leaves_a_cache_plain() -> None:
    with probe.replaced(FakeAiter().library):
        ops = table()
        assert ops.resolve("paged_attention", BF16, BF16, **DRAFT) is not None
        assert "keeps the cache packed" in ops.describe()


LAYOUTS = st.sampled_from([PLAIN, PACKED, "tiled"])
CANDIDATES = st.lists(
    st.tuples(st.sampled_from(["aiter", "gluon", "triton", "torch"]), LAYOUTS, st.booleans()),
    max_size=5,
)


@given(st.tuples(CANDIDATES, CANDIDATES, CANDIDATES))
@settings(max_examples=100)
def test_the_ops_of_one_cache_never_disagree(
    candidates: tuple[list[tuple[str, str, bool]], ...],
) -> None:
    def entry(name: str, kept: str, runs: bool) -> Implementation:
        return Implementation(name, lambda _: None if runs else "no", lambda: kept, kept)

    registry = {
        op: (*(entry(*each) for each in listed), Implementation("torch", always, lambda: PLAIN))
        for op, listed in zip(CACHE_OPS, candidates, strict=True)
    }
    ops = OpTable(MI300X, registry)
    chosen = ops.resolve_together(CACHE_OPS, BF16, BF16, num_heads=4)
    assert len(set(chosen)) == 1
    assert ops.resolve_together(CACHE_OPS, BF16, BF16, num_heads=4) == chosen
    assert {ops.resolve(op, BF16, BF16, num_heads=4) for op in CACHE_OPS} == {PLAIN}


def test_a_cache_that_only_disagreeing_ops_could_share_is_refused() -> None:
    entries = {PLAIN: Implementation("torch", always, lambda: PLAIN)}
    entries[PACKED] = Implementation("aiter", always, lambda: PACKED, PACKED)
    registry = {"write": (entries[PACKED],), "read": (entries[PLAIN],)}
    with pytest.raises(OpUnavailableError, match="keeps the cache packed"):
        OpTable(MI300X, registry).resolve_together(("write", "read"), BF16, BF16)
