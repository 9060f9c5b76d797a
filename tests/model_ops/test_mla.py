"""Latent attention against a plain reading of its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_ops.batches import Part, attention_metadata

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.attention.mla import LatentUpProjection, MLAAttention
from atom.model_ops.kernels.torch import mla
from atom.model_ops.layer_context import LayerContext
from atom.platform import cpu_platform

HEADS, RANK, NOPE, ROPE, V = 3, 16, 6, 4, 8
BLOCK = 4
SCALE = 0.3


@dataclass
class Batch:
    """Random contexts in a shuffled pool; the last tokens of each are the queries."""

    metadata: AttentionMetadata
    cache: LatentCacheTensor
    contexts: list[torch.Tensor]
    q: torch.Tensor
    up_proj: torch.Tensor


def make_batch(lengths: list[tuple[int, int]], seed: int = 0) -> Batch:
    """lengths: (context, queries) of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(-(-context // BLOCK) for context, _ in lengths)
    free = torch.randperm(total + 3, generator=generator).tolist()
    pool = torch.randn(total + 3, BLOCK, RANK + ROPE, generator=generator)
    sequences, contexts = [], []
    for context, queries in lengths:
        blocks = [free.pop() for _ in range(-(-context // BLOCK))]
        contexts.append(pool[blocks].flatten(0, 1)[:context])
        sequences.append(Part(queries, context - queries, blocks))
    num_tokens = sum(queries for _, queries in lengths)
    return Batch(
        attention_metadata(sequences, BLOCK, torch.device("cpu")),
        LatentCacheTensor(pool),
        contexts,
        torch.randn(num_tokens, HEADS, NOPE + ROPE, generator=generator),
        torch.randn(HEADS, NOPE + V, RANK, generator=generator) / RANK**0.5,
    )


def by_definition(batch: Batch) -> torch.Tensor:
    """One query at a time, in float64."""
    out = []
    q, up = batch.q.double(), batch.up_proj.double()
    rows = iter(q)
    for context, length in zip(batch.contexts, batch.metadata.query_lens_cpu, strict=True):
        latent, k_rope = context.double().split((RANK, ROPE), dim=-1)
        keys = torch.einsum("cr,hnr->hcn", latent, up[:, :NOPE])
        keys = torch.cat((keys, k_rope.expand(HEADS, -1, -1)), dim=-1)
        values = torch.einsum("cr,hvr->hcv", latent, up[:, NOPE:])
        for seen in range(len(context) - length + 1, len(context) + 1):
            weights = torch.einsum("hd,hcd->hc", next(rows), keys[:, :seen]) * SCALE
            out.append(torch.einsum("hc,hcv->hv", weights.softmax(dim=-1), values[:, :seen]))
    return torch.stack(out).float()


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 12)).map(lambda n: (n[0] + n[1], n[1])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 100),
)
def test_any_batch_equals_the_definition(lengths: list[tuple[int, int]], seed: int) -> None:
    batch = make_batch(lengths, seed)
    out = mla.mla_attention(batch.q, batch.cache, batch.up_proj, batch.metadata, SCALE)
    torch.testing.assert_close(out, by_definition(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [0.0, float("inf")], ids=["all_expanded", "all_absorbed"])
def test_both_readings_equal_the_definition(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "absorb_limit", lambda *_: limit)
    batch = make_batch([(9, 9), (17, 4), (5, 1), (20, 9)])
    out = mla.mla_attention(batch.q, batch.cache, batch.up_proj, batch.metadata, SCALE)
    torch.testing.assert_close(out, by_definition(batch), atol=1e-5, rtol=1e-5)


def _recording(
    calls: list[tuple[str, int]], name: str, run: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def call(q: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append((name, q.shape[1]))
        return run(q, *rest)

    return call


def test_query_lengths_decide_which_reading_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    for name in ("_absorbed", "_expanded"):
        monkeypatch.setattr(mla, name, _recording(calls, name, getattr(mla, name)))
    limit = int(mla.absorb_limit(RANK, NOPE + V))
    batch = make_batch([(40, limit), (40, limit + 1), (7, 1)])
    mla.mla_attention(batch.q, batch.cache, batch.up_proj, batch.metadata, SCALE)
    assert calls == [("_absorbed", 1), ("_absorbed", limit), ("_expanded", limit + 1)]


def test_the_limit_for_published_sizes() -> None:
    """DeepSeek-V3 and Kimi-K2: every decode and verify absorbs, long prompts expand."""
    assert 170 <= mla.absorb_limit(512, 128 + 128) < 171
    assert mla.absorb_limit(8, 16) == float("inf")


def test_writing_fills_the_slots_and_skips_padding() -> None:
    cache = LatentCacheTensor(torch.zeros(3, BLOCK, RANK + ROPE))
    latent, k_rope = torch.randn(3, RANK), torch.randn(3, ROPE)
    mla.mla_cache_write(latent, k_rope, cache, torch.tensor([9, -1, 2]))
    flat = cache.latent.flatten(0, 1)
    assert torch.equal(flat[9], torch.cat((latent[0], k_rope[0])))
    assert torch.equal(flat[2], torch.cat((latent[2], k_rope[2])))
    assert flat.any(dim=1).sum() == 2


def test_a_cache_of_another_kind_is_refused() -> None:
    context = LayerContext.create(torch.float32, 8, cpu_platform())
    layer = MLAAttention(HEADS, RANK, ROPE, V, SCALE, context)
    wrong = KVCacheTensor(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    with pytest.raises(TypeError, match="latents, not KVCacheTensor"):
        layer.bind_kv_cache(wrong)


def test_the_up_projection_takes_a_checkpoint_matrix_whole() -> None:
    context = LayerContext.create(torch.float32, 8, cpu_platform())
    layer = LatentUpProjection(HEADS, RANK, NOPE + V, context, "kv_b_proj")
    weight = torch.randn(HEADS * (NOPE + V), RANK)
    layer.load_weight("weight", weight, None)
    assert torch.equal(layer.by_head()[1], weight[NOPE + V : 2 * (NOPE + V)])
    with pytest.raises(ValueError, match="shape"):
        layer.load_weight("weight", weight[1:], None)
    with pytest.raises(ValueError, match="weight, not bias"):
        layer.load_weight("bias", weight, None)
