"""A KV cache of 8 bits, or of another type than the model's, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_ops.batches import Part, attention_metadata

from atom.model_ops.attention.kv_scale import FP8_TYPES
from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.kernels.torch import attention, mla
from atom.model_ops.kernels.torch.fp8 import dequantise, quantise
from atom.platform import Platform

BLOCK = 4
SCALE = 0.3
STORAGES = [*FP8_TYPES, torch.bfloat16]

Numbers = Callable[..., torch.Tensor]


@pytest.fixture
def numbers() -> Numbers:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def by_definition(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest number of the type, the even code between two; in float64."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(dtype).double()
    finite = values.isfinite()
    codes, values = codes[finite], values[finite]
    distance = (x.double()[:, None] - values).abs()
    nearest = distance == distance.amin(dim=1, keepdim=True)
    even = nearest & (codes % 2 == 0)
    chosen = torch.where(even.any(dim=1, keepdim=True), even, nearest)
    return values[chosen.int().argmax(dim=1)]


@pytest.mark.parametrize("dtype", FP8_TYPES, ids=str)
def test_rounding(dtype: torch.dtype, numbers: Numbers) -> None:
    """To the nearest even, with saturation, for numbers of every magnitude and for ties."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    spread = numbers(2000) * 2.0 ** torch.linspace(-14, 12, 2000)
    x = torch.cat((values, ties, spread, torch.tensor([1e9, -1e9, torch.inf, -torch.inf])))
    stored = quantise(x, torch.ones(1), dtype)
    limit = torch.finfo(dtype).max
    assert torch.equal(stored.double(), by_definition(x.clamp(-limit, limit), dtype))
    assert quantise(torch.tensor([torch.nan]), torch.ones(1), dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", FP8_TYPES, ids=str)
def test_scales_divide_and_multiply(dtype: torch.dtype, numbers: Numbers) -> None:
    x, scale = numbers(500).bfloat16(), torch.tensor([0.037])
    stored = quantise(x, scale, dtype)
    assert torch.equal(stored.double(), by_definition(x.float() / scale, dtype))
    assert torch.equal(dequantise(stored, scale, torch.float32), stored.float() * scale)


def test_the_device_decides_which_8_bits() -> None:
    fnuz = {arch for arch in ("gfx90a", "gfx942", "gfx950") if _fp8("rocm", arch) is FP8_TYPES[1]}
    assert fnuz == {"gfx942"}
    assert _fp8("cuda", "sm90") is _fp8("cpu", "avx2") is torch.float8_e4m3fn


def _fp8(kind: str, arch: str) -> torch.dtype:
    return Platform(kind, arch, True).fp8_dtype


def metadata_of(lengths: list[tuple[int, int]]) -> AttentionMetadata:
    """Sequences of (context, queries) in a shuffled pool."""
    total = sum(-(-context // BLOCK) for context, _ in lengths)
    free = torch.randperm(total, generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [
        Part(queries, context - queries, [free.pop() for _ in range(-(-context // BLOCK))])
        for context, queries in lengths
    ]
    return attention_metadata(sequences, BLOCK, torch.device("cpu"))


def written(metadata: AttentionMetadata, count: int) -> list[torch.Tensor]:
    """Slots of all context tokens of each sequence."""
    tables, lens = metadata.block_tables.long(), metadata.context_lens.tolist()
    slots = (tables[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    return [row[:length] for row, length in zip(slots, lens, strict=True)][:count]


LENGTHS = [(9, 1), (30, 1), (13, 5), (21, 21), (4, 1)]


def scale_for(storage: torch.dtype, value: float) -> torch.Tensor | None:
    return torch.tensor([value]) if storage in FP8_TYPES else None


def real(x: torch.Tensor, scale: torch.Tensor | None, storage: torch.dtype) -> torch.Tensor:
    """What a cache keeps of `x`, in float64."""
    if scale is None:
        return x.to(storage).double()
    return by_definition((x / scale).flatten(), storage).view(x.shape) * scale.double()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_keys_and_values(storage: torch.dtype, window: int | None, numbers: Numbers) -> None:
    metadata = metadata_of(LENGTHS)
    heads, kv_heads, dim = 4, 2, 16
    blocks = sum(-(-context // BLOCK) for context, _ in LENGTHS)
    key, value = (torch.zeros(blocks, BLOCK, kv_heads, dim).to(storage) for _ in range(2))
    cache = KVCacheTensor(key, value, scale_for(storage, 0.02), scale_for(storage, 0.5))
    everything = written(metadata, len(LENGTHS))
    k, v = (numbers(len(torch.cat(everything)), kv_heads, dim) for _ in range(2))
    attention.kv_cache_write(k, v, cache, torch.cat(everything))
    before = key.view(torch.uint8).clone()
    attention.kv_cache_write(k, v, cache, torch.full((len(k),), -1))
    assert torch.equal(key.view(torch.uint8), before)

    q = numbers(int(metadata.cu_seqlens_q[-1]), heads, dim)
    out = attention.paged_attention(q, cache, metadata, SCALE, window)
    keys = real(k, cache.key_scale, storage).split([len(s) for s in everything])
    values = real(v, cache.value_scale, storage).split([len(s) for s in everything])
    rows = iter(zip(q.double(), out.double(), strict=True))
    for (context, queries), own_k, own_v in zip(LENGTHS, keys, values, strict=True):
        for end in range(context - queries + 1, context + 1):
            row, ours = next(rows)
            start = 0 if window is None else max(0, end - window)
            seen_k = own_k[start:end].repeat_interleave(heads // kv_heads, dim=1)
            seen_v = own_v[start:end].repeat_interleave(heads // kv_heads, dim=1)
            weights = (torch.einsum("hd,chd->hc", row, seen_k) * SCALE).softmax(dim=-1)
            torch.testing.assert_close(
                ours, torch.einsum("hc,chd->hd", weights, seen_v), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_latents(storage: torch.dtype, numbers: Numbers) -> None:
    """The same as over a float32 cache of the numbers that the 8-bit one stands for."""
    metadata = metadata_of(LENGTHS)
    heads, rank, nope, rope, v_dim = 3, 16, 6, 4, 8
    blocks = sum(-(-context // BLOCK) for context, _ in LENGTHS)
    shape = blocks, BLOCK, rank + rope
    cache = LatentCacheTensor(torch.zeros(shape).to(storage), scale_for(storage, 0.02))
    plain = LatentCacheTensor(torch.zeros(shape))
    slots = torch.cat(written(metadata, len(LENGTHS)))
    rows = numbers(len(slots), rank + rope)
    mla.mla_cache_write(rows[:, :rank], rows[:, rank:], cache, slots)
    kept = real(rows, cache.scale, storage).float()
    mla.mla_cache_write(kept[:, :rank], kept[:, rank:], plain, slots)
    q = numbers(int(metadata.cu_seqlens_q[-1]), heads, nope + rope)
    up_proj = numbers(heads, nope + v_dim, rank)
    ours, expected = (mla.mla_attention(q, c, up_proj, metadata, SCALE) for c in (cache, plain))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", [torch.float32, *STORAGES], ids=str)
def test_what_lies_behind_a_context_may_be_anything(storage: torch.dtype, numbers: Numbers) -> None:
    """Blocks come with their last owner's numbers, and those may have been NaN."""
    metadata = metadata_of(LENGTHS)
    blocks = sum(-(-context // BLOCK) for context, _ in LENGTHS)
    everything = torch.cat(written(metadata, len(LENGTHS)))
    queries = int(metadata.cu_seqlens_q[-1])
    k, v, q = (
        numbers(len(everything), 2, 16),
        numbers(len(everything), 2, 16),
        numbers(queries, 4, 16),
    )
    latent, rope = numbers(len(everything), 24), numbers(len(everything), 8)
    q_latent, up = numbers(queries, 3, 16), numbers(3, 18, 24)
    outs = []
    for filler in (0.0, torch.nan):
        key, value = (torch.full((blocks, BLOCK, 2, 16), filler).to(storage) for _ in range(2))
        cache = KVCacheTensor(key, value, scale_for(storage, 0.02), scale_for(storage, 0.5))
        attention.kv_cache_write(k, v, cache, everything)
        pool = torch.full((blocks, BLOCK, 32), filler).to(storage)
        latents = LatentCacheTensor(pool, scale_for(storage, 0.02))
        mla.mla_cache_write(latent, rope, latents, everything)
        outs.append(
            (
                attention.paged_attention(q, cache, metadata, SCALE, None),
                mla.mla_attention(q_latent, latents, up, metadata, SCALE),
            )
        )
    for clean, dirty in zip(*outs, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)
