"""Layers without grouped queries decode through Gluon, and never through aiter's assembly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_aiter import ENTRY_POINTS, FakeAiter
from test_triton_attention import metadata_of

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.gluon import paged_attention as gluon
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.platform import Platform

MI300X, MI355X = Platform("rocm", "gfx942", True), Platform("rocm", "gfx950", True)
MI250X, H200 = Platform("rocm", "gfx90a", True), Platform("cuda", "sm90", True)
CACHE_OPS = ("kv_cache_write", "paged_attention", "prefill_attention")
DRAFT = {
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 128,
    "block_size": 16,
    "num_blocks": 70_000,
    "sliding_window": 0,
}
BF16 = torch.bfloat16


def decode_of(
    ops: OpTable, dtype: torch.dtype = BF16, storage: torch.dtype = BF16, **shape: int
) -> Any:
    _, decode, _ = ops.resolve_together(CACHE_OPS, dtype, storage, **{**DRAFT, **shape})
    return decode


def is_gluon(function: Any) -> bool:
    return function is gluon.paged_attention


@pytest.fixture(params=[MI300X, MI355X], ids=lambda platform: platform.arch)
def platform(request: pytest.FixtureRequest) -> Platform:
    return request.param


def test_the_device_decides_the_generation(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(gluon, "current_platform", lambda: platform)
    monkeypatch.setattr(gluon, "attend", lambda generation, *_: seen.append(generation))
    gluon.paged_attention(*[None] * 5)
    assert seen == [{"gfx942": 3, "gfx950": 4}[platform.arch]]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_without_aiter_ours_decodes(platform: Platform, head_dim: int, block_size: int) -> None:
    ops = OpTable(platform, OPS)
    for storage in (BF16, platform.fp8_dtype):
        shape = {"head_dim": head_dim, "block_size": block_size}
        assert is_gluon(decode_of(ops, BF16, storage, **shape))
        assert is_gluon(decode_of(ops, BF16, storage, sliding_window=9, **shape))
    assert is_gluon(decode_of(ops, torch.float16, torch.float16))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_heads": 8}, "num_heads=8 is not num_kv_heads=4"),
        ({"head_dim": 96}, "head_dim=96 is none of (64, 128)"),
        ({"block_size": 48}, "block_size=48 is none of (16, 32, 64, 128)"),
        ({"dtype": torch.float32, "storage": torch.float32}, "not torch.float32"),
        ({"storage": torch.float8_e5m2}, "not torch.float8_e5m2"),
    ],
)
def test_what_ours_is_not_written_for_is_refused(
    platform: Platform, changes: dict[str, Any], reason: str
) -> None:
    ops = OpTable(platform, OPS)
    assert not is_gluon(decode_of(ops, **changes))
    assert reason in ops.describe()


@pytest.mark.parametrize("other", [MI250X, H200], ids=lambda platform: platform.arch)
def test_other_platforms_do_not_offer_it(other: Platform) -> None:
    ops = OpTable(other, OPS)
    decode_of(ops)
    assert "gluon" not in ops.describe()


def test_aiter_has_only_its_gluon_kernel() -> None:
    assert {name for name in ENTRY_POINTS if name.startswith("pa_")} == {"pa_decode_gluon"}


@pytest.mark.parametrize("num_blocks", [100, 65_535, 65_536, 1_000_000])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("window", [0, 9])
def test_with_aiter_one_of_the_two_decodes(
    platform: Platform, num_blocks: int, head_dim: int, block_size: int, window: int
) -> None:
    fake = FakeAiter(arch=platform.arch)
    with probe.replaced(fake.library):
        ops = OpTable(platform, OPS)
        shape = {"num_blocks": num_blocks, "head_dim": head_dim, "block_size": block_size}
        decode = decode_of(ops, sliding_window=window, **shape)
        if is_gluon(decode):
            return
        pool = torch.zeros(2, 4, block_size, 4, head_dim, dtype=BF16)
        metadata = metadata_of([(9, 1), (3, 1)], block_size, 4, torch.device("cpu"))
        q = torch.randn(2, 4, head_dim).to(BF16)
        decode(q, KVCacheTensor(pool[0], pool[1]), metadata, 1.0, window or None)
        assert fake.names == {"pa_decode_gluon"}
