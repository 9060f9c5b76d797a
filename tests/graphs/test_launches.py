"""How many kernels a decoder layer launches in a decode step on a GPU: each is a node of its graph.

A replayed graph takes some microseconds a node, whatever the kernel does. Layers of published sizes
run on tensors that hold no data, with the ops that the table chooses for a GPU without FlashMLA,
and for Kimi with aiter, too. What all layers of a step share is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from graphs.launch_count import (
    BATCH,
    BLOCK_SIZE,
    CONTEXT,
    KIMI,
    LLAMA,
    META,
    Launches,
    aiter,
    assert_at_most,
    context_for,
    count_triton,
    rank_of,
    without,
)
from quantised.compressed import INT4
from transformers import DeepseekV3Config, PretrainedConfig

from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_ops.attention.metadata import AttentionMetadata
from atom.model_ops.kernels import probe
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.formats.fp8 import Fp8Config
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.models.llama import LlamaDecoderLayer
from atom.models.moe.deepseek_v2 import DeepseekV3DecoderLayer

pytest.importorskip("triton")

PUBLISHED = parse_quantization(
    {**INT4, "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*"]}, {}
)


@pytest.fixture
def seen() -> Launches:
    return Launches()


@pytest.fixture(params=["sm90", "gfx942"])
def context(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerContext:
    return context_for(request.param, without("aiter", "flash_mla"), monkeypatch)


@pytest.fixture(params=["sm90", "gfx942", "gfx942 aiter", "gfx950 aiter"])
def any_context(
    request: pytest.FixtureRequest, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LayerContext]:
    """With aiter, too."""
    yield from contexts(request.param, seen, monkeypatch, 1)


@pytest.fixture(params=["sm90", "gfx942", "gfx942 aiter", "gfx950 aiter"])
def of_eight(
    request: pytest.FixtureRequest, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LayerContext, bool]]:
    """A rank of eight, whose sums are launches of their own, and whether it has aiter's ops."""
    for context in contexts(request.param, seen, monkeypatch, 8):
        yield context, "aiter" in request.param


def contexts(
    what: str, seen: Launches, patch: pytest.MonkeyPatch, num_ranks: int
) -> Iterator[LayerContext]:
    arch, _, library = what.partition(" ")
    group = rank_of(num_ranks, seen)
    if not library:
        yield context_for(arch, without("aiter", "flash_mla"), patch, group)
        return
    with probe.replaced(aiter(arch, seen)):
        yield context_for(arch, without("flash_mla"), patch, group)


@dataclass(frozen=True)
class Step:
    """What a decode step gives every layer."""

    hidden: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata

    @classmethod
    def of(cls, config: PretrainedConfig, size: int, queries: int) -> Step:
        integers = torch.empty(size, dtype=torch.int32, device=META)
        positions = torch.empty(size * queries, dtype=torch.int64, device=META)
        metadata = AttentionMetadata(
            slot_mapping=positions,
            block_tables=integers[:, None].expand(size, CONTEXT // BLOCK_SIZE).contiguous(),
            block_counts=integers,
            context_lens=integers,
            cu_seqlens_q=torch.empty(size + 1, dtype=torch.int32, device=META),
            max_seqlen_q=queries,
            max_context_len=CONTEXT,
            query_lens_cpu=(queries,) * size,
            context_lens_cpu=None,
        )
        hidden = torch.empty(size * queries, config.hidden_size, dtype=torch.bfloat16, device=META)
        return cls(hidden, positions, metadata)


def launches(
    layer: LlamaDecoderLayer,
    rotary: RotaryEmbedding,
    config: PretrainedConfig,
    context: LayerContext,
    seen: Launches,
    monkeypatch: pytest.MonkeyPatch,
    size: int = BATCH,
    queries: int = 1,
    storage: torch.dtype | None = None,
) -> list[str]:
    """Of one layer, from the norm before its attention to the product before the next norm."""
    for module in layer.modules():
        if convert := getattr(module, "process_after_loading", None):
            convert()
    cache = PagedCache(attention_layers(layer), BLOCK_SIZE, storage or context.dtype, META)
    cache.allocate_kv_cache_tensors(BATCH * CONTEXT // BLOCK_SIZE)
    bind_kv_caches(layer, [cache])
    step = Step.of(config, size, queries)
    count_triton(seen, monkeypatch)
    for _ in range(2):  # the first layer of a step makes what all of them share
        seen.names.clear()
        with torch.inference_mode(), seen:
            x, residual = layer.enter(step.hidden, step.hidden)
            layer(x, residual, AttentionInputs(step.positions, step.metadata, rotary))
    return seen.names


def quantised(context: LayerContext, monkeypatch: pytest.MonkeyPatch, norms: str) -> LayerContext:
    """In FP8, with inputs in groups of 128; `norms` runs the norms that may quantise them."""
    for op in ("ADD_RMS_NORM_QUANTISE", "RMS_NORM_PAIR_QUANTISE"):
        monkeypatch.setenv(f"ATOM_OP_{op}", norms)
    return replace(context, quant=Fp8Config(True, False, False, frozenset(), {}))


@pytest.mark.parametrize("norms", ["torch", "triton"])
def test_of_a_quantised_llama_layer(
    norms: str, context: LayerContext, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms quantise what the next product reads, or the products of few rows do."""
    context = quantised(context, monkeypatch, norms)
    layer = LlamaDecoderLayer(LLAMA, 0, context, "model.layers.0")
    rotary = RotaryEmbedding(LLAMA, 128, context)
    assert_at_most(10, launches(layer, rotary, LLAMA, context, seen, monkeypatch))


def test_of_a_llama_layer(
    context: LayerContext, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LlamaDecoderLayer(LLAMA, 0, context, "model.layers.0")
    rotary = RotaryEmbedding(LLAMA, 128, context)
    assert_at_most(10, launches(layer, rotary, LLAMA, context, seen, monkeypatch))


def kimi_launches(
    layer_id: int,
    context: LayerContext,
    seen: Launches,
    monkeypatch: pytest.MonkeyPatch,
    *shape: int,
    config: PretrainedConfig = KIMI,
    storage: torch.dtype | None = None,
) -> list[str]:
    layer = DeepseekV3DecoderLayer(config, layer_id, context, f"model.layers.{layer_id}")
    rotary = RotaryEmbedding(config, 64, context, interleaved=True)
    return launches(layer, rotary, config, context, seen, monkeypatch, *shape, storage=storage)


@pytest.mark.parametrize(("norms", "most"), [("torch", 19), ("triton", 18)])
def test_of_a_quantised_kimi_layer(
    norms: str,
    most: int,
    any_context: LayerContext,
    seen: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norm before the router also quantises what Triton's experts read."""
    context = quantised(any_context, monkeypatch, norms)
    assert_at_most(most, kimi_launches(1, context, seen, monkeypatch))


@pytest.mark.parametrize(("norms", "most"), [("torch", 15), ("triton", 14)])
def test_of_a_quantised_dense_kimi_layer(
    norms: str,
    most: int,
    any_context: LayerContext,
    seen: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what reads more than 128 MiB of weights needs the norm to quantise it."""
    context = quantised(any_context, monkeypatch, norms)
    assert_at_most(most, kimi_launches(0, context, seen, monkeypatch))


def test_of_a_kimi_layer_as_published(
    any_context: LayerContext, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The routed experts in int4, the rest plain, the shared expert among the routed ones."""
    context = replace(any_context, quant=PUBLISHED)
    assert_at_most(17, kimi_launches(1, context, seen, monkeypatch))


def test_of_a_kimi_layer(
    any_context: LayerContext, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_at_most(17, kimi_launches(1, any_context, seen, monkeypatch))


# Of sequences with so many queries each, on a rank of eight: with Triton's ops, and with aiter's.
OF_EIGHT = {
    "bfloat16": {(1, 1): (19, 18), (1, 4): (19, 18), (BATCH, 4): (19, 18)},
    "published": {(1, 1): (19, 21), (1, 4): (19, 21), (BATCH, 4): (19, 21)},
    "FP8 blocks": {(1, 1): (20, 22), (1, 4): (20, 22), (BATCH, 4): (21, 23)},
}


@pytest.mark.parametrize(
    "shape", [pytest.param((1, 1), marks=pytest.mark.slow), (1, 4), (BATCH, 4)], ids=str
)
@pytest.mark.parametrize("stored", list(OF_EIGHT))
def test_of_a_kimi_layer_on_a_rank_of_eight(
    stored: str,
    shape: tuple[int, int],
    of_eight: tuple[LayerContext, bool],
    seen: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sums over the ranks, and roundings of more than 16 rows."""
    context, has_aiter = of_eight
    if stored == "published":
        context = replace(context, quant=PUBLISHED)
    elif stored == "FP8 blocks":
        context = quantised(context, monkeypatch, "triton")
    found = kimi_launches(1, context, seen, monkeypatch, *shape)
    assert found.count("all_reduce") == 2
    is_measured = context.ops.platform.arch == "gfx950" or stored != "published"
    is_aiters = has_aiter and is_measured
    assert any(name.startswith("aiter fused_moe") for name in found) is is_aiters
    assert_at_most(OF_EIGHT[stored][shape][is_aiters], found)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_of_a_kimi_layer_with_latents_in_8_bits(
    arch: str, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the heads of one rank of eight; the lists of work belong to the step."""
    fields = KIMI.to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = DeepseekV3Config(**fields)
    with probe.replaced(aiter(arch, seen)):
        context = context_for(arch, without("flash_mla"), monkeypatch)
        storage = context.ops.platform.fp8_dtype
        names = kimi_launches(1, context, seen, monkeypatch, config=config, storage=storage)
    assert_at_most(15, names)
    assert "aiter mla_decode_fwd 2/2" in names
    assert not any("get_mla_metadata" in name for name in names)
