"""Every aiter adapter against float64 references: over the fake, and over aiter on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aiter_cases import (
    BF16,
    Aiter,
    all_slots,
    as_kept,
    attention,
    batch,
    check,
    random,
    unknown_lengths,
)

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor

CACHE_OPS = ("kv_cache_write", "paged_attention", "prefill_attention")


def test_linear(aiter: Aiter) -> None:
    linear = aiter.ops.resolve("linear", BF16, in_features=256, out_features=96)
    weight, bias = random(aiter, 96, 256, seed=1), random(aiter, 96, seed=2)
    for x in (random(aiter, 5, 256), random(aiter, 5, 512)[:, :256], random(aiter, 2, 3, 256)):
        wanted = x.double() @ weight.double().T
        check(linear(x, weight, None), wanted)
        check(linear(x, weight, bias), wanted + bias.double())
    aiter.called("gemm_a16w16")


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def test_rms_norm(aiter: Aiter) -> None:
    rms_norm = aiter.ops.resolve("rms_norm", BF16, size=256)
    weight = random(aiter, 256, seed=1)
    for x in (random(aiter, 5, 256), random(aiter, 5, 320)[:, :256], random(aiter, 5, 4, 256)):
        before = x.clone()
        check(rms_norm(x, weight, 1e-5), norm(x, weight))
        assert torch.equal(x, before)
    aiter.called("rmsnorm2d_fwd")


def test_add_rms_norm(aiter: Aiter) -> None:
    add_rms_norm = aiter.ops.resolve("add_rms_norm", BF16, size=256)
    x, residual, weight = random(aiter, 5, 256), random(aiter, 5, 256, seed=1), random(aiter, 256)
    before = x.clone(), residual.clone()
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    check(total, x.double() + residual.double())
    check(out, norm(total, weight), 2**-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    aiter.called("rmsnorm2d_fwd_with_add")


def test_silu_and_mul(aiter: Aiter) -> None:
    silu_and_mul = aiter.ops.resolve("silu_and_mul", BF16, size=256)
    x = random(aiter, 5, 512)
    check(silu_and_mul(x), F.silu(x[:, :256].double()) * x[:, 256:].double())
    aiter.called("silu_and_mul")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [128, 64])
def test_rope(aiter: Aiter, interleaved: bool, rotary_dim: int) -> None:
    rope = aiter.ops.resolve("rope", BF16, head_dim=128)
    fused = random(aiter, 5, 7, 128)
    q, k = fused[:, :4], fused[:, 4:6]
    angles = torch.rand(40, rotary_dim // 2, device=aiter.device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([3, 39, 0, 7, 7], device=aiter.device)
    before = fused.clone()
    rotated = rope(positions, q, k, cos_sin, interleaved)
    for x, out in zip((q, k), rotated, strict=True):
        if interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        first, second = x[..., :rotary_dim].double().chunk(2, dim=-1)
        cos, sin = (f(angles[positions][:, None].double()) for f in (torch.cos, torch.sin))
        halves = first * cos - second * sin, second * cos + first * sin
        check(out, torch.cat((*halves, x[..., rotary_dim:].double()), dim=-1))
    assert torch.equal(fused, before)
    aiter.called("rope_cached_positions_2c_fwd_inplace")


@dataclass(frozen=True)
class Layer:
    """An attention layer, its cache, and what was written to it.

    Attributes:
        rows: each sequence's keys and values.
    """

    metadata: AttentionMetadata
    cache: KVCacheTensor
    decode: Any
    prefill: Any
    q: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]


def layer(
    aiter: Aiter,
    heads: tuple[int, int],
    query_lens: list[int],
    context_lens: list[int],
    storage: torch.dtype | None = None,
    block_size: int = 16,
    sliding_window: int = 0,
    head_dim: int = 128,
) -> Layer:
    """Writes every token of every sequence, in an order of its own."""
    width = -(-max(context_lens) // block_size)
    metadata = batch(aiter, query_lens, context_lens, block_size, width)
    num_blocks = len(query_lens) * width + 1
    storage = storage or BF16
    pools = torch.zeros(2, num_blocks, block_size, heads[1], head_dim, device=aiter.device).to(
        storage
    )
    is_8_bits = storage.itemsize == 1
    scales = [torch.tensor([x], device=aiter.device) for x in (0.03, 0.05)] if is_8_bits else ()
    cache = KVCacheTensor(pools[0], pools[1], *scales)
    write, decode, prefill = aiter.ops.resolve_together(
        CACHE_OPS,
        BF16,
        storage,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        sliding_window=sliding_window,
    )
    slots = torch.cat(all_slots(metadata, block_size))
    # As they leave a fused projection: rows apart. The last token is padding.
    fused = random(aiter, len(slots) + 1, 2 * heads[1], head_dim, seed=5)
    k, v = fused[:, : heads[1]], fused[:, heads[1] :]
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(6)).to(aiter.device)
    index = F.pad(order, (0, 1), value=len(slots))
    padded = F.pad(slots[order], (0, 1), value=-1)
    shuffled = fused[index]
    write(shuffled[:, : heads[1]], shuffled[:, heads[1] :], cache, padded)
    kept = [
        as_kept(x[: len(slots)], storage, s)
        for x, s in zip((k, v), scales or (None, None), strict=True)
    ]
    rows = list(zip(*(x.split(context_lens) for x in kept), strict=True))
    q = random(aiter, sum(query_lens), heads[0], head_dim, seed=7)
    return Layer(metadata, cache, decode, prefill, q, rows)


def check_layer(made: Layer, window: int | None = None, decode: bool = True) -> None:
    wanted = attention(made.q, made.rows, made.metadata, 0.1, window)
    arguments = made.q, made.cache
    if decode:
        for metadata in (made.metadata, unknown_lengths(made.metadata)):
            check(made.decode(*arguments, metadata, 0.1, window), wanted)
    check(made.prefill(*arguments, made.metadata, 0.1, window), wanted)


@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 3, 3], [1, 5, 2]])
def test_grouped_layers(
    aiter: Aiter, heads: tuple[int, int], block_size: int, query_lens: list[int]
) -> None:
    check_layer(layer(aiter, heads, query_lens, [40, 7, 90], block_size=block_size, head_dim=64))
    aiter.called("reshape_and_cache_flash", "unified_attention")


def test_prefill_gathers_where_most_tokens_are_new(aiter: Aiter) -> None:
    check_layer(layer(aiter, (8, 2), [30, 17, 1], [40, 17, 5]), decode=False)
    aiter.called("reshape_and_cache_flash", "flash_attn_varlen_func")


@pytest.mark.parametrize(("query_lens", "decode"), [([2, 1, 3], True), ([37, 20, 1], False)])
def test_windows(aiter: Aiter, query_lens: list[int], decode: bool) -> None:
    made = layer(aiter, (8, 2), query_lens, [40, 33, 5], sliding_window=9)
    check_layer(made, window=9, decode=decode)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 4, 4], [1, 4, 2], [1, 5, 2]])
def test_layers_with_a_query_head_a_kv_head_are_packed(
    aiter: Aiter, block_size: int, query_lens: list[int]
) -> None:
    check_layer(layer(aiter, (2, 2), query_lens, [40, 7, 300], block_size=block_size))
    gluon = ["pa_decode_gluon"] if max(query_lens) <= 4 else []
    aiter.called("reshape_and_cache", "unified_attention", *gluon)


@pytest.mark.parametrize(
    ("queries", "sequences", "name"),
    [
        (1, 1, "pa_decode_gluon"),
        (1, 12, "pa_decode_gluon"),
        (3, 1, "pa_decode_gluon"),
        (3, 9, "pa_decode_gluon"),
        (3, 10, "unified_attention"),
    ],
)
def test_gluon_gets_one_query_and_always_as_many_partitions(
    aiter: Aiter, queries: int, sequences: int, name: str
) -> None:
    """Sequences of several queries that fill the device are read once for all of them."""
    made = layer(aiter, (64, 64), [queries] * sequences, [5] * sequences)
    made.decode(made.q, made.cache, made.metadata, 0.1, None)
    aiter.called("reshape_and_cache", name)
    if aiter.fake is not None and name == "pa_decode_gluon":
        arguments = aiter.fake.calls[-1].arguments
        assert arguments["query_length"] == 1
        assert arguments["max_context_partition_num"] == 16
        assert len(arguments["context_lengths"]) == queries * sequences


def test_packed_prefill_gathers_where_most_tokens_are_new(aiter: Aiter) -> None:
    check_layer(layer(aiter, (2, 2), [30, 17, 1], [40, 17, 5]), decode=False)
    aiter.called("reshape_and_cache", "flash_attn_varlen_func")


@pytest.mark.parametrize("heads", [(8, 2), (2, 2)])
def test_caches_in_8_bits(aiter: Aiter, heads: tuple[int, int]) -> None:
    storage = aiter.ops.platform.fp8_dtype
    check_layer(layer(aiter, heads, [1, 3], [40, 19], storage), decode=True)
    check_layer(layer(aiter, heads, [40, 19], [40, 19], storage), decode=False)


@pytest.mark.parametrize("heads", [(8, 2), (2, 2)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_caches_in_8_bits_saturate(
    aiter: Aiter, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    storage = aiter.ops.platform.fp8_dtype
    limit = torch.finfo(storage).max
    pools = torch.zeros(2, 2, 16, heads[1], 128, device=aiter.device).to(storage)
    scales = [torch.tensor([x], device=aiter.device) for x in (0.0041911, 0.7)]
    write, _, _ = aiter.ops.resolve_together(
        CACHE_OPS,
        dtype,
        storage,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        block_size=16,
        num_blocks=2,
        sliding_window=0,
    )
    factors = (-torch.inf, -1e4, -1.001, -1.0, -0.97, 0.5, 0.97, 1.0, 1.001, 1.04, 1e3, torch.inf)
    wanted = torch.tensor(factors, device=aiter.device).clamp(-1, 1) * limit
    rows = torch.tensor(factors, device=aiter.device)[:, None, None].expand(-1, heads[1], 128)
    k, v = ((rows * (limit * scale)).to(dtype) for scale in scales)
    write(k, v, KVCacheTensor(pools[0], pools[1], *scales), torch.arange(12, device=aiter.device))
    numbers = wanted.to(storage).float().unique()
    for pool in pools:
        written = pool[0].float().unique()
        assert torch.equal(written[written != 0], numbers)
