"""The bytes that achieved bandwidths stand on, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.config import ModelOptions
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import fill_with_dummy_weights
from atom.model_ops.kernels.torch import quant as torch_quant
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import LinearBase
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.weights import held_bytes
from atom.models.registry import create_model
from atom.platform import cpu_platform

Module = Callable[[str], Any]


def test_paged_attention(benchmark_module: Module) -> None:
    """One Llama-3-8B layer reads 4 KiB a cached token in bfloat16, half of it in 8 bits."""
    b = benchmark_module("_bytes")
    lens = [100, 28]
    ends = 2 * 2 * 3 * 32 * 128 * 2  # queries and results of two sequences
    assert b.paged_attention_bytes(lens, 3, 32, 8, 128, b.Sizes(2, 2)) == 128 * 4096 + ends
    assert b.paged_attention_bytes(lens, 3, 32, 8, 128, b.Sizes(2, 1)) == 128 * 2048 + ends


def test_mla_attention(benchmark_module: Module) -> None:
    """A latent of Kimi-K2.5 takes 1152 bytes for all heads together."""
    b = benchmark_module("_bytes")
    widths = {"num_heads": 8, "rank": 512, "rope_dim": 64, "nope_dim": 128, "v_dim": 128}
    found = b.mla_attention_bytes([1000, 1], 1, **widths, sizes=b.Sizes(2, 2))
    up_projection = 8 * 256 * 512 * 2
    queries, results = 2 * 8 * 192 * 2, 2 * 8 * 128 * 2
    assert found == 1001 * 1152 + up_projection + queries + results
    in_8_bits = b.mla_attention_bytes([1000, 1], 1, **widths, sizes=b.Sizes(2, 1))
    assert found - in_8_bits == 1001 * 576


def test_moe_experts(benchmark_module: Module) -> None:
    """An expert of one rank of eight takes 11 MB."""
    b = benchmark_module("_bytes")
    expert = 3 * 7168 * 256 * 2
    assert expert == 11_010_048
    found = b.moe_experts_bytes(11, 2, 8, 7168, 256, 2)
    assert found == 11 * expert + 2 * 2 * 7168 * 2 + 16 * 12


def test_linear(benchmark_module: Module) -> None:
    """Of few rows next to nothing but the weights is read."""
    found = benchmark_module("_bytes").linear_bytes(4, 4096, 6144, 2)
    assert found == 50_331_648 + 4 * (4096 + 6144) * 2


@pytest.mark.parametrize("name", ["fp8", "int4", "mxfp4"])
def test_quantised(benchmark_module: Module, name: str) -> None:
    """As many as tensors of that format hold, also in blocks that are not full."""
    b, products = benchmark_module("_bytes"), benchmark_module("_product_loads")
    form = products.FORMATS[name]
    weights = products.random_weights(form, torch.Generator(), 200, 320)
    scale = weights.scale.itemsize
    assert b.quantised_bytes(form, 200, 320, scale) == held_bytes(weights)
    assert b.linear_bytes(4, 320, 200, 2, 1000) == 1000 + 4 * 520 * 2
    expert = b.moe_experts_bytes(11, 2, 8, 7168, 256, 2, 5_000_000)
    assert expert == 55_000_000 + 2 * 2 * 7168 * 2 + 16 * 12


def test_choice(benchmark_module: Module) -> None:
    assert benchmark_module("_bytes").choice_bytes(64, 163840) == 41_943_040 + 64 * 8


def test_operations(benchmark_module: Module) -> None:
    """Products as they are written down, position by position."""
    o = benchmark_module("_operations")
    assert o.linear_operations(3, 10, 20) == 3 * 20 * (10 + 10)
    assert o.moe_experts_operations(5, 2, 10, 20) == 10 * 3 * 2 * 10 * 20
    lens, queries = [7, 5], 3
    seen = (5 + 6 + 7) + (3 + 4 + 5)
    assert o.paged_attention_operations(lens, queries, 2, 16) == seen * 2 * (16 + 16) * 2
    sizes = {"num_heads": 2, "rank": 8, "rope_dim": 4, "nope_dim": 6, "v_dim": 5}
    rows = 2 * queries
    absorbed = rows * 8 * (6 + 5) + seen * (8 + 4 + 8)
    assert o.mla_decode_operations(lens, queries, **sizes) == 2 * 2 * absorbed
    expanded = 12 * 8 * (6 + 5) + seen * (6 + 4 + 5)
    assert o.mla_prefill_operations(lens, queries, **sizes) == 2 * 2 * expanded


def small_model(
    folder: Path, shape: Any, module: Module, storage: torch.dtype, quantization: str = "auto"
) -> Any:
    folder.mkdir(exist_ok=True)
    target, _ = module("_decode_shapes").write_configs(folder, shape, 64)
    options = ModelOptions(str(target), load_format="dummy", quantization=quantization)
    source = resolve_model(options)
    context = LayerContext.create(torch.float32, 64, cpu_platform())
    context = replace(context, quant=source.quantization)
    model = create_model(source.hf_config, context)
    cache = PagedCache(attention_layers(model), 16, storage, context.device)
    cache.allocate_kv_cache_tensors(2)
    bind_kv_caches(model, [cache])
    return model


@pytest.mark.parametrize(("storage", "size"), [(torch.float32, 4), (torch.float8_e4m3fn, 1)])
def test_a_llama(benchmark_module: Module, tmp_path: Path, storage: torch.dtype, size: int) -> None:
    shape = benchmark_module("_decode_shapes").SHAPES["tiny"]
    model = small_model(tmp_path, shape, benchmark_module, storage)
    found = benchmark_module("_bytes").model_bytes(model)
    attention = 64 * (4 + 2 * 2) * 16 + 4 * 16 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert found.always == 4 * (2 * layer + 64 + 128 * 64)
    assert (found.embedding_row, found.expert) == (4 * 64, ())
    assert found.cached_token == 2 * 2 * 2 * 16 * size
    tokens, cached = 3, 50
    step = found.always + 3 * 256 + (50 + 3) * found.cached_token
    assert found.step(tokens, cached, ()) == step


def test_a_tied_embedding_is_read_as_the_head(benchmark_module: Module, tmp_path: Path) -> None:
    shapes = benchmark_module("_decode_shapes")
    apart = shapes.SHAPES["tiny"]
    tied = shapes.Shape("tied", {**apart.target, "tie_word_embeddings": True}, apart.draft)
    model_bytes = benchmark_module("_bytes").model_bytes
    ours = model_bytes(small_model(tmp_path / "tied", tied, benchmark_module, torch.float32))
    assert ours == model_bytes(
        small_model(tmp_path / "apart", apart, benchmark_module, torch.float32)
    )


def test_experts_and_latents(benchmark_module: Module, tmp_path: Path) -> None:
    shape = benchmark_module("_decode_shapes").SHAPES["tiny-kimi"]
    model = small_model(tmp_path, shape, benchmark_module, torch.float32)
    found = benchmark_module("_bytes").model_bytes(model)
    assert found.expert == (4 * 3 * 64 * 32,)  # the first layer is dense
    assert found.cached_token == 4 * 2 * (32 + 16)
    everything = sum(p.numel() * 4 for p in model.parameters())
    assert found.always == everything - 4 * 128 * 64 - 8 * found.expert[0]
    assert found.step(1, 9, [2]) == (
        found.always + found.embedding_row + 2 * found.expert[0] + 10 * found.cached_token
    )


def test_shapes_are_those_of_the_models(benchmark_module: Module) -> None:
    shapes = benchmark_module("_decode_shapes").SHAPES
    target, draft = shapes["kimi"].target, shapes["kimi"].draft
    assert [target[n] for n in ("num_attention_heads", "moe_intermediate_size")] == [8, 256]
    assert target["vocab_size"] == draft["vocab_size"] == draft["draft_vocab_size"] == 20480
    assert (draft["num_key_value_heads"], draft["head_dim"]) == (8, 128)
    assert shapes["8b"].has_peer
    assert not shapes["kimi"].has_peer


@pytest.mark.parametrize("kind", ["tiny", "tiny-kimi"])
def test_quantised_weights(
    benchmark_module: Module, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two numbers to a byte, and four bytes for every 32; heads and latents are as they were."""
    shape = benchmark_module("_decode_shapes").SHAPES[kind]
    plain = benchmark_module("_bytes").model_bytes(
        small_model(tmp_path / "plain", shape, benchmark_module, torch.float32)
    )
    monkeypatch.setenv("ATOM_OP_QUANT_LINEAR", "torch")
    monkeypatch.setenv("ATOM_OP_QUANT_EXPERTS", "torch")
    monkeypatch.setattr(torch_quant, "prepare_linear", lambda weights, _: weights)
    monkeypatch.setattr(torch_quant, "prepare_experts", lambda w13, w2, _: (w13, w2))
    model = small_model(tmp_path, shape, benchmark_module, torch.float32, quantization="int4")
    fill_with_dummy_weights(model)
    quantised = [m for m in model.modules() if isinstance(m, (LinearBase, FusedMoE))]
    shapes = [m.storage for m in quantised if isinstance(m, LinearBase)]
    dense = sum(4 * sum(s.rows) * s.columns for s in shapes)
    for layer in quantised:
        layer.process_after_loading()
    found = benchmark_module("_bytes").model_bytes(model)
    assert found.always == plain.always - dense + dense * 5 // 32
    assert found.expert == tuple(size * 5 // 32 for size in plain.expert)
    assert found.embedding_row == plain.embedding_row
