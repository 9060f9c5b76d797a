"""What a graph captures of aiter's adapters asks the device for nothing, nor copies to it.

On tensors that hold no data; the kernels are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_aiter import AITER, ENTRY_POINTS
from fake_aiter_quant import ActivationType, QuantType
from graphs.test_capture_without_host import nothing_from_the_host

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter import mla, quant_linear
from atom.model_ops.kernels.aiter.moe import prepare_experts
from atom.model_ops.kernels.aiter.quant import (
    FP8_BLOCKS,
    FP8_CHANNEL,
    FP8_POWER_BLOCKS,
    FP8_STATIC,
    INT8_CHANNEL,
    MXFP4,
)
from atom.model_ops.kernels.packed_cache import PACKED_ENTRY_POINTS
from atom.model_ops.quant.weights import QuantWeights, WeightFormat
from atom.model_ops.registry import OpTable
from atom.model_ops.routing import Routing
from atom.platform import Platform

BF16 = torch.bfloat16
SEQUENCES = 3
CHOICES = {"num_experts": 8, "top_k": 2, "elsewhere": 0}


def _like_the_first(*args: Any, **_: Any) -> torch.Tensor:
    return torch.empty_like(args[0])


def _sizes_of_work(sequences: int, *_: Any, **__: Any) -> tuple[tuple[Any, torch.dtype], ...]:
    shapes = (2, 257, (sequences + 255, 8), sequences + 1, (sequences, 2), sequences + 255)
    return tuple((s, torch.int32 if i else torch.uint64) for i, s in enumerate(shapes))


def _twice_the_first(*args: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(args[0]), torch.empty_like(args[0])


FUNCTIONS = {
    **dict.fromkeys(ENTRY_POINTS, _like_the_first),
    **dict.fromkeys((point.name for point in PACKED_ENTRY_POINTS), _like_the_first),
    **{name: _twice_the_first for name in ENTRY_POINTS if name.endswith("_quant_hip")},
    "QuantType": QuantType,
    "ActivationType": ActivationType,
    "stage2_uses_route_reduce": lambda stage2: not stage2,
    "get_2stage_cfgs": lambda *_, **__: SimpleNamespace(stage1=partial(len), stage2=partial(len)),
    "get_gfx": lambda: "gfx950",
    "get_cu_num": lambda: 256,
    "get_mla_metadata_info_v1": _sizes_of_work,
    "get_GEMM_A16W16_config": lambda *_: {"libtype": "torch"},
}
LIBRARY = probe.Library(lambda _: FUNCTIONS, has_program=lambda _: True)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def in_a_graph(queries: int) -> AttentionMetadata:
    return AttentionMetadata(
        slot_mapping=empty(SEQUENCES * queries, dtype=torch.int64),
        block_tables=integers(SEQUENCES, 8),
        block_counts=integers(SEQUENCES),
        context_lens=integers(SEQUENCES),
        cu_seqlens_q=integers(SEQUENCES + 1),
        max_seqlen_q=queries,
        max_context_len=128,
        query_lens_cpu=(queries,) * SEQUENCES,
        context_lens_cpu=None,
    )


def attention(ops: OpTable, metadata: AttentionMetadata, heads: int, kv_heads: int) -> torch.Tensor:
    tokens = len(metadata.slot_mapping)
    write, decode, _ = ops.resolve_together(
        ("kv_cache_write", "paged_attention", "prefill_attention"),
        BF16,
        BF16,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        block_size=16,
        num_blocks=9,
        sliding_window=0,
    )
    cache = KVCacheTensor(empty(9, 16, kv_heads, 128), empty(9, 16, kv_heads, 128))
    fused = empty(tokens, heads + 2 * kv_heads, 128)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    write(k, v, cache, metadata.slot_mapping)
    return decode(q, cache, metadata, 0.1, None)


def latent_attention(
    ops: OpTable, metadata: AttentionMetadata, storage: torch.dtype = BF16
) -> torch.Tensor:
    tokens = len(metadata.slot_mapping)
    shape = {"num_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 32}
    shape |= {"block_size": 16, "num_blocks": 9}
    scale = None if storage == BF16 else empty(1, dtype=torch.float32)
    cache = LatentCacheTensor(empty(9, 16, 576, dtype=storage), scale)
    write = ops.resolve("mla_cache_write", BF16, storage, **shape)
    write(empty(tokens, 512), empty(tokens, 64), cache, metadata.slot_mapping)
    decode = ops.resolve("mla_decode", BF16, storage, **shape)
    return decode(empty(tokens, 8, 80), cache, empty(8, 48, 512), metadata, 0.1)


def latents_in_8_bits(ops: OpTable, metadata: AttentionMetadata) -> torch.Tensor:
    return latent_attention(ops, metadata, ops.platform.fp8_dtype)


def mlp(ops: OpTable, metadata: AttentionMetadata) -> torch.Tensor:
    tokens = len(metadata.slot_mapping)
    routing = Routing(8, 2, "sigmoid", 2, 1, "top2_sum", True, 2.0)
    shape = {"num_experts": 8, "top_k": 2, "num_groups": 2, "softmax": 0, "pair_scores": 1}
    route = ops.resolve("moe_route", torch.float32, **shape, has_bias=1)
    logits, bias = empty(tokens, 8, dtype=torch.float32), empty(8, dtype=torch.float32)
    weights, ids = route(logits, bias, routing)
    sizes = {**CHOICES, "hidden_size": 64, "intermediate_size": 64}
    experts = ops.resolve("moe_experts", BF16, **sizes)
    x, total = ops.resolve("add_rms_norm", BF16, size=64)(
        empty(tokens, 64), empty(tokens, 64), empty(64), 1e-5
    )
    x = ops.resolve("rms_norm", BF16, size=64)(x + total, empty(64), 1e-5)
    q, _ = ops.resolve("rope", BF16, head_dim=64)(
        empty(tokens, dtype=torch.int64),
        x[:, None],
        x[:, None],
        empty(128, 64, dtype=torch.float32),
        True,
    )
    x = ops.resolve("silu_and_mul", BF16, size=64)(torch.cat((q[:, 0], x), dim=-1))
    return experts(x, *prepare_experts(empty(8, 128, 64), empty(8, 64, 64)), weights, ids)


def few_rows(ops: OpTable, metadata: AttentionMetadata) -> torch.Tensor:
    linear = ops.resolve("linear", BF16, in_features=256, out_features=256)
    out: torch.Tensor = linear(empty(len(metadata.slot_mapping), 256), empty(256, 256), None)
    return out


def quantised_weights(form: WeightFormat, *shape: int) -> QuantWeights:
    """[..., out, in], square."""
    leading, size = shape[:-1], shape[-1]
    dtypes = {"fp4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    columns = size // 2 if form.codes == "fp4" else size
    weights = QuantWeights(form, empty(*leading, columns, dtype=dtypes[form.codes]))
    if form.columns:
        scale = torch.uint8 if form.scale_type == "e8m0" else torch.float32
        blocks = shape[-2] // form.rows, size // form.columns
        weights.scale = empty(*shape[:-2], *blocks, dtype=scale)
    else:
        weights.row_scale = empty(*leading, dtype=torch.float32)
    weights.input_scale = empty(dtype=torch.float32)
    return weights


def products(ops: OpTable, metadata: AttentionMetadata) -> torch.Tensor:
    x = empty(len(metadata.slot_mapping), 256)
    for form in (*FP8_BLOCKS, *FP8_POWER_BLOCKS, FP8_CHANNEL, FP8_STATIC, INT8_CHANNEL, MXFP4):
        sizes = {"in_features": 256, "out_features": 256}
        choice = ops.resolve_weights("quant_linear", BF16, form, **sizes)
        assert choice.prepare is not None
        prepared = choice.prepare(quantised_weights(form, 256, 256), BF16)
        x = choice.function(x, prepared, empty(256)).to(BF16)
    weights = empty(len(x), 2, dtype=torch.float32)
    for form in (*FP8_BLOCKS, FP8_CHANNEL, MXFP4):
        sizes = {**CHOICES, "hidden_size": 256, "intermediate_size": 256}
        choice = ops.resolve_weights("quant_experts", BF16, form, **sizes)
        assert choice.prepare is not None
        both = (quantised_weights(form, 8, rows, 256) for rows in (512, 256))
        x = choice.function(x, *choice.prepare(*both, BF16), weights, integers(len(x), 2))
    return x


@pytest.mark.parametrize("queries", [1, 4, 8])
@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda ops, metadata: attention(ops, metadata, 8, 2), (8, 128)),
        (lambda ops, metadata: attention(ops, metadata, 4, 4), (4, 128)),
        (latent_attention, (8, 32)),
        (latents_in_8_bits, (8, 32)),
        (mlp, (64,)),
        (few_rows, (256,)),
        (products, (256,)),
    ],
    ids=["grouped", "packed", "latent", "latent-8-bits", "mlp", "few-rows", "quantised"],
)
def test_nothing_is_asked(
    run: Callable[[OpTable, AttentionMetadata], torch.Tensor],
    shape: tuple[int, ...],
    queries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mla, "list_slots", lambda *given: integers(given[5]))
    monkeypatch.setattr(mla, "triton_decode", lambda q, *_: empty(len(q), 8, 32))
    monkeypatch.setattr(mla, "absorb", lambda q, _, cache, heads, __: empty(len(q), heads, 576))
    monkeypatch.setattr(quant_linear, "triton_linear", lambda x, w, _: empty(len(x), w.rows))
    with probe.replaced(LIBRARY):
        ops = OpTable(Platform("rocm", "gfx950", True), AITER)
        with nothing_from_the_host():
            out = run(ops, in_a_graph(queries))
    assert out.shape == (SEQUENCES * queries, *shape)
