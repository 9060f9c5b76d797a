"""How many kernels a decoder layer launches in a decode step on a GPU: each is a node of its graph.

A replayed graph takes some microseconds a node, whatever the kernel does. Layers of published sizes
run on tensors that hold no data, with the ops that the table chooses for a GPU without aiter or
FlashMLA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_ops.kernels.torch import linear
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.metadata import AttentionMetadata
from atom.model_ops.ops import OPS
from atom.model_ops.quant.formats.fp8 import Fp8Config
from atom.model_ops.quant.formats.online import OnlineConfig
from atom.model_ops.registry import OpTable
from atom.model_ops.rotary import RotaryEmbedding
from atom.models.deepseek_v2 import DeepseekV3DecoderLayer
from atom.models.llama import LlamaDecoderLayer
from atom.platform import Platform, current_platform

pytest.importorskip("triton")

BATCH, CONTEXT, BLOCK_SIZE = 8, 8192, 64
META = torch.device("meta")
LLAMA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_hidden_layers=2,
)
KIMI = DeepseekV3Config(
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
)


class Launches(TorchDispatchMode):
    """Lists kernels instead of running them.

    Attributes:
        names: of Triton's kernels, and of torch's operations that launch one, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # such as `to` and `contiguous`, which may copy or not
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name in ("detach", "_unsafe_view")):
            self.names.append(str(func))
        if func is torch.ops.aten.mm.dtype:  # which has no shape function
            x, weight, dtype = args
            return x.new_empty(x.shape[0], weight.shape[1], dtype=dtype)
        return func(*args, **kwargs)

    def launched(self, kernel: Any) -> None:
        self.names.append(f"triton {kernel.fn.__name__}")


@pytest.fixture(params=["sm90", "gfx942"])
def context(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerContext:
    kind = "cuda" if request.param == "sm90" else "rocm"
    platform = Platform(kind, request.param, True)
    current_platform()  # asks torch once what this processor can do
    monkeypatch.setattr(linear, "current_platform", lambda: platform)
    own = {
        op: tuple(e for e in entries if e.name not in ("aiter", "flash_mla"))
        for op, entries in OPS.items()
    }
    ops = OpTable(platform, own)
    return LayerContext(torch.bfloat16, META, ops, CONTEXT)


@dataclass(frozen=True)
class Step:
    """What a decode step gives every layer."""

    hidden: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata

    @classmethod
    def of(cls, config: PretrainedConfig) -> Step:
        integers = torch.empty(BATCH, dtype=torch.int32, device=META)
        positions = integers.long()
        metadata = AttentionMetadata(
            slot_mapping=positions,
            block_tables=integers[:, None].expand(BATCH, CONTEXT // BLOCK_SIZE).contiguous(),
            block_counts=integers,
            context_lens=integers,
            cu_seqlens_q=torch.empty(BATCH + 1, dtype=torch.int32, device=META),
            max_seqlen_q=1,
            max_context_len=CONTEXT,
            query_lens_cpu=(1,) * BATCH,
            context_lens_cpu=None,
        )
        hidden = torch.empty(BATCH, config.hidden_size, dtype=torch.bfloat16, device=META)
        return cls(hidden, positions, metadata)


def launches(
    layer: LlamaDecoderLayer,
    rotary: RotaryEmbedding,
    config: PretrainedConfig,
    context: LayerContext,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """Of one layer, from the norm before its attention to the product before the next norm."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in layer.modules():
        if convert := getattr(module, "process_after_loading", None):
            convert()
    cache = PagedCache(attention_layers(layer), BLOCK_SIZE, context.dtype, META)
    cache.allocate_kv_cache_tensors(BATCH * CONTEXT // BLOCK_SIZE)
    bind_kv_caches(layer, [cache])
    step, seen = Step.of(config), Launches()
    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", lambda kernel, *_, **__: seen.launched(kernel))
    with torch.inference_mode(), seen:
        x, residual = layer.enter(step.hidden, step.hidden)
        layer(x, residual, step.positions, step.metadata, rotary)
    return seen.names


def assert_at_most(most: int, names: list[str]) -> None:
    listed = "\n".join(f"{i:3} {name}" for i, name in enumerate(names, start=1))
    assert len(names) <= most, f"{len(names)} launches, at most {most}:\n{listed}"


def quantised(context: LayerContext, monkeypatch: pytest.MonkeyPatch, norms: str) -> LayerContext:
    """In FP8, with inputs in groups of 128; `norms` runs the norms that may quantise them."""
    for op in ("ADD_RMS_NORM_QUANTISE", "RMS_NORM_PAIR_QUANTISE"):
        monkeypatch.setenv(f"ATOM_OP_{op}", norms)
    return replace(context, quant=Fp8Config(True, False, False, frozenset(), {}))


@pytest.mark.parametrize(("norms", "most"), [("torch", 14), ("triton", 12)])
def test_of_a_quantised_llama_layer(
    norms: str, most: int, context: LayerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both norms quantise what the next product reads."""
    context = quantised(context, monkeypatch, norms)
    layer = LlamaDecoderLayer(LLAMA, 0, context, "model.layers.0")
    rotary = RotaryEmbedding(LLAMA, 128, context)
    assert_at_most(most, launches(layer, rotary, LLAMA, context, monkeypatch))


@pytest.mark.parametrize(("norms", "most"), [("torch", 22), ("triton", 20)])
def test_of_a_quantised_kimi_layer(
    norms: str, most: int, context: LayerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm before the attention, and that of the latents."""
    context = quantised(context, monkeypatch, norms)
    layer = DeepseekV3DecoderLayer(KIMI, 1, context, "model.layers.1")
    rotary = RotaryEmbedding(KIMI, 64, context, interleaved=True)
    assert_at_most(most, launches(layer, rotary, KIMI, context, monkeypatch))


@pytest.mark.parametrize(("norms", "most"), [("torch", 19), ("triton", 16)])
def test_of_a_quantised_dense_kimi_layer(
    norms: str, most: int, context: LayerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = quantised(context, monkeypatch, norms)
    layer = DeepseekV3DecoderLayer(KIMI, 0, context, "model.layers.0")
    rotary = RotaryEmbedding(KIMI, 64, context, interleaved=True)
    assert_at_most(most, launches(layer, rotary, KIMI, context, monkeypatch))


def test_of_a_llama_layer(context: LayerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LlamaDecoderLayer(LLAMA, 0, context, "model.layers.0")
    rotary = RotaryEmbedding(LLAMA, 128, context)
    assert_at_most(10, launches(layer, rotary, LLAMA, context, monkeypatch))


def test_of_a_kimi_layer_whose_shared_expert_is_stored_otherwise(
    context: LayerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As published: the routed experts in int4, the rest plain."""
    context = replace(context, quant=OnlineConfig("int4", ("*.self_attn", "*.shared_experts")))
    layer = DeepseekV3DecoderLayer(KIMI, 1, context, "model.layers.1")
    rotary = RotaryEmbedding(KIMI, 64, context, interleaved=True)
    assert_at_most(21, launches(layer, rotary, KIMI, context, monkeypatch))


def test_of_a_kimi_layer(context: LayerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = DeepseekV3DecoderLayer(KIMI, 1, context, "model.layers.1")
    rotary = RotaryEmbedding(KIMI, 64, context, interleaved=True)
    assert_at_most(17, launches(layer, rotary, KIMI, context, monkeypatch))
