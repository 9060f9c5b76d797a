"""Capped scores and sinks: every implementation of attention against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest
import test_triton_attention as heads
import torch

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor
from atom.model_ops.kernels.native import attention as native
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import attention as plain
from atom.model_ops.kernels.triton.attention import (
    fixed_splits,
    invariant_attention,
    paged_attention,
    prefill_attention,
)
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpQuery, OpTable, preference
from atom.platform import Platform, current_platform

Attend = Callable[..., torch.Tensor]
FP8 = torch.float8_e4m3fn
CAUSAL: dict[str, Attend] = {
    "torch": plain.paged_attention,
    "native": native.paged_attention,
    "decode": partial(paged_attention.attend, 1),
    "decode in splits": partial(paged_attention.attend, 1000),
    "prefill": partial(prefill_attention.attend, 1),
    "prefill in splits": partial(prefill_attention.attend, 1000),
    "invariant": invariant_attention.paged_attention,
}
BLOCK: dict[str, Attend] = {
    "torch": plain.block_attention,
    "native": native.block_attention,
    "decode": paged_attention.block_attention,
    "invariant": invariant_attention.block_attention,
}
ON_CPU = ("torch", "native")
# Scores of these tests are within 6; so a cap of 2 bends most of them.
CAPS = {"cap": 2.0, "sinks": None, "both": 2.0}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def sinks_of(kind: str, num_heads: int, device: torch.device) -> torch.Tensor | None:
    """Of which one takes nearly all the weight, and one none."""
    if kind not in ("sinks", "both"):
        return None
    sinks = torch.linspace(-1.0, 2.0, num_heads)
    sinks[0], sinks[-1] = 30.0, -300.0
    return sinks.to(device)


def skip_unless_run(name: str, device: torch.device) -> None:
    if name == "native" and (device.type != "cpu" or native_build().reason):
        pytest.skip("no native kernels")


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_splits, "SPLIT_KEYS", 64)
    monkeypatch.setattr(prefill_attention, "_SHORTEST_SPLIT", 64)
    monkeypatch.setattr(paged_attention, "_SHORTEST_SPLIT", 64)


def exact(
    q: torch.Tensor,
    cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """By definition, query by query, in float64."""
    key = heads.real_values(cache.key, cache.key_scale)
    value = heads.real_values(cache.value, cache.value_scale)
    group = q.shape[1] // key.shape[2]
    starts, out = metadata.cu_seqlens_q.tolist(), []
    for b, context in enumerate(metadata.context_lens.tolist()):
        table = metadata.block_tables[b].cpu().long()
        k, v = (
            x[table].flatten(0, 1)[:context].repeat_interleave(group, dim=1) for x in (key, value)
        )
        for i in range(starts[b], starts[b + 1]):
            position = context - starts[b + 1] + i
            first = 0 if window is None else max(position - window + 1, 0)
            stop = position + 1 if causal else context
            scores = torch.einsum("hd,khd->hk", q[i].cpu().double(), k[first:stop]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.cpu().double()[:, None]), dim=1)
            weights = scores.softmax(dim=1)[:, : stop - first]
            out.append(torch.einsum("hk,khd->hd", weights, v[first:stop]))
    return torch.stack(out)


def check(
    attend: Attend,
    kind: str,
    device: torch.device,
    sequences: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    storage: torch.dtype | None = None,
    window: int | None = None,
    causal: bool = True,
    num_heads: tuple[int, int] = (6, 2),
    head_dim: int = 24,
) -> None:
    blocks = sum(-(-context // 16) for context, _ in sequences) + 1
    metadata = heads.metadata_of(sequences, 16, blocks, device)
    cache = heads.random_cache((blocks, 16, num_heads[1], head_dim), storage or dtype, device)
    tokens = sum(queries for _, queries in sequences)
    q = torch.randn(tokens, num_heads[0], head_dim, generator=torch.Generator().manual_seed(2))
    q = (q * 2).to(device, dtype)
    special = CAPS[kind], sinks_of(kind, num_heads[0], device)
    where = q, cache, metadata, head_dim**-0.5, window, *special
    wanted = exact(*where, causal=causal)
    found = attend(*where)
    assert found.dtype is dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("kind", CAPS)
@pytest.mark.parametrize("window", [None, 40])
def test_equals_the_definition(
    name: str, kind: str, window: int | None, device: torch.device
) -> None:
    """Single tokens, drafts that are verified, and a prompt behind a prefix."""
    skip_unless_run(name, device)
    sequences = [(1, 1), (140, 3), (70, 18)]
    check(CAUSAL[name], kind, device, sequences, window=window)


@pytest.mark.parametrize("name", BLOCK)
@pytest.mark.parametrize("kind", ["cap", "sinks"])
def test_blocks_that_see_all_of_themselves(name: str, kind: str, device: torch.device) -> None:
    skip_unless_run(name, device)
    check(BLOCK[name], kind, device, [(8, 8), (75, 4)], window=70, causal=False)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_caches(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Scales of keys are within the cap."""
    skip_unless_run(name, device)
    heads.skip_unless_converted(FP8)
    check(CAUSAL[name], "both", device, [(90, 2), (5, 5)], dtype, FP8)


@pytest.mark.parametrize("name", CAUSAL)
def test_bfloat16(name: str, device: torch.device) -> None:
    skip_unless_run(name, device)
    check(CAUSAL[name], "both", device, [(90, 2), (30, 30)], torch.bfloat16, num_heads=(8, 1))


@pytest.mark.skipif(native_build().reason is not None, reason="no native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_a_query_has_the_same_bits_in_every_batch(dtype: torch.dtype, window: int | None) -> None:
    context, cpu = 333, torch.device("cpu")
    whole = heads.metadata_of([(context, context)], 16, 30, cpu)
    cache = heads.random_cache((30, 16, 3, 64), dtype, cpu)
    q = torch.randn(context, 9, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    special = 0.125, window, 2.0, sinks_of("both", 9, cpu)
    expected = native.paged_attention(q, cache, whole, *special)
    for stop in (1, 64, 200, context):
        for queries in (n for n in (1, 2, 5, 70) if n <= stop):
            lens = [(7, 7), (stop, queries)]
            metadata = replace(
                heads.metadata_of(lens, 16, 60, cpu),
                block_tables=whole.block_tables.expand(2, -1).contiguous(),
            )
            part = torch.cat((q[:7], q[stop - queries : stop]))
            found = native.paged_attention(part, cache, metadata, *special)
            assert torch.equal(found[:7], expected[:7])
            assert torch.equal(found[7:], expected[stop - queries : stop])


def test_a_context_shorter_than_its_queries_gives_zeros(device: torch.device) -> None:
    """As graphs pad a batch: the sinks alone have no value."""
    metadata = heads.metadata_of([(70, 1), (2, 2)], 16, 8, device)
    metadata.context_lens[1:] = 0
    cache = heads.random_cache((8, 16, 1, 32), torch.float32, device)
    q = torch.randn(3, 2, 32).to(device)
    for name, attend in CAUSAL.items():
        if name not in ON_CPU:
            out = attend(q, cache, metadata, 0.2, None, 2.0, sinks_of("both", 2, device))
            assert torch.equal(out[1:], torch.zeros_like(out[1:])), name


def test_native_sinks_are_one_for_each_head() -> None:
    if native_build().reason:
        pytest.skip("no native kernels")
    cpu = torch.device("cpu")
    metadata = heads.metadata_of([(3, 1)], 16, 1, cpu)
    cache = heads.random_cache((1, 16, 2, 64), torch.float32, cpu)
    for sinks in (torch.zeros(3), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="paged_attention"):
            native.paged_attention(torch.zeros(1, 4, 64), cache, metadata, 1.0, None, None, sinks)


class TestTable:
    SHAPE: ClassVar = {
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 64,
        "block_size": 64,
        "num_blocks": 9,
    }

    @pytest.mark.parametrize("special", ["softcap", "sinks"])
    def test_kernels_without_it_say_so(self, special: str) -> None:
        gpu = Platform("rocm", "gfx942", has_native_bf16=True)
        shape = {**self.SHAPE, "sliding_window": 0, special: 1}
        query = OpQuery(gpu, torch.bfloat16, shape, torch.bfloat16)
        for op in ("paged_attention", "prefill_attention"):
            refused = {i.name: i.refuses(query) for i in OPS[op] if i.name in preference(gpu)}
            assert refused["triton"] is None
            if op == "paged_attention":
                assert refused["gluon"] == f"computes a plain softmax, without {special}"
            plainly = replace(query, shape={**self.SHAPE, "sliding_window": 0})
            assert op != "paged_attention" or _gluon_takes(plainly)

    def test_the_table_chooses_for_the_platform(self) -> None:
        platform = current_platform()
        chosen = OpTable(platform, OPS).resolve_together(
            ("paged_attention", "prefill_attention"),
            torch.float32,
            torch.float32,
            **self.SHAPE,
            sliding_window=0,
            sinks=1,
        )
        assert all(chosen)


def _gluon_takes(query: OpQuery) -> bool:
    [gluon] = [i for i in OPS["paged_attention"] if i.name == "gluon"]
    return gluon.refuses(query) is None
