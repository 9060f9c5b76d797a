"""How many kernels a decoder layer launches in a decode step on a GPU: each is a node of its graph.

A replayed graph takes some microseconds a node, whatever the kernel does. Layers of published sizes
run on tensors that hold no data, with the ops that the table chooses for a GPU without FlashMLA,
and for Kimi with aiter, too. What all layers of a step share is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_ops.kernels import probe
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
# Entry points of aiter's that these layers need not call, but whose absence changes choices.
UNUSED = (
    *("biased_grouped_topk", "grouped_topk", "topk_softmax", "concat_and_cache_mla"),
    *("rope_cached_positions_2c_fwd_inplace", "flash_attn_varlen_func"),
)
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


@pytest.fixture
def seen() -> Launches:
    return Launches()


def of_moe(given: Mapping[str, Any]) -> int:
    """Tokens sorted by one kernel, up to some 40 of them with 385 experts, and two products. In FP8
    blocks inputs of both are quantised: `fused_moe_2stages`, which runs up to 32 tokens.
    """
    return 5 if "quant_type" in given else 3


# How many kernels a call of aiter's of 2026-08-22 launches at the sizes of these tests.
AITER_LAUNCHES: Mapping[str, int | Callable[[Mapping[str, Any]], int]] = {
    # aiter/tuned_gemm.py: the library's product where no other is tuned.
    "gemm_a16w16": 1,
    # aiter/ops/gemm_op_a8w8.py: one kernel of CK's.
    "gemm_a8w8_blockscale": 1,
    "per_group_quant_hip": 1,
    "rmsnorm2d_fwd": 1,
    "rmsnorm2d_fwd_with_add": 1,
    "silu_and_mul": 1,
    # aiter/mla.py: `torch.full` for the numbers of splits that have keys, the assembly kernel, and
    # `_fwd_kernel_stage2_asm`, which joins the splits.
    "mla_decode_fwd": 3,
    # aiter/fused_moe.py, csrc/include/moe_sorting_opus.h.
    "fused_moe": of_moe,
}


def aiter(arch: str, seen: Launches) -> probe.Library:
    """Functions that return what an adapter goes on with, and count what they would launch."""

    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
        dtype = given.get("dtype") or given["otype"]
        return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)

    def quantised(x: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        codes = x.new_empty(x.shape, dtype=given["quant_dtype"])
        return codes, x.new_empty(x.shape[0], x.shape[1] // 128, dtype=torch.float32)

    def same(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x

    results: dict[str, Any] = {
        "gemm_a16w16": product,
        "gemm_a8w8_blockscale": product,
        "per_group_quant_hip": quantised,
        "rmsnorm2d_fwd": same,
        "fused_moe": same,
    }

    def counted(name: str) -> Callable[..., Any]:
        launches = AITER_LAUNCHES[name]

        def call(*args: Any, **given: Any) -> Any:
            count = launches if isinstance(launches, int) else launches(given)
            seen.names += [f"aiter {name} {i}/{count}" for i in range(1, count + 1)]
            return results.get(name, lambda *_, **__: None)(*args, **given)

        return call

    loading = dict.fromkeys(("shuffle_weight", "e8m0_shuffle"), same)
    asked = {
        "get_gfx": lambda: arch,
        "get_cu_num": lambda: {"gfx942": 304, "gfx950": 256}[arch],
        "get_GEMM_A16W16_config": lambda *_: {"libtype": "torch"},
        "QuantType": type("QuantType", (), {"per_128x128": "per_128x128"}),
        "wvSpltK": None,  # for up to 4 rows
    }
    functions = {name: counted(name) for name in AITER_LAUNCHES} | loading | asked
    functions |= dict.fromkeys(UNUSED, lambda *_, **__: pytest.fail("not counted"))
    return probe.Library(lambda _: functions)


def context_for(arch: str, ops: Mapping[str, Any], patch: pytest.MonkeyPatch) -> LayerContext:
    platform = Platform("cuda" if arch == "sm90" else "rocm", arch, True)
    current_platform()  # asks torch once what this processor can do
    patch.setattr(linear, "current_platform", lambda: platform)
    return LayerContext(torch.bfloat16, META, OpTable(platform, ops), CONTEXT)


def without(*names: str) -> dict[str, Any]:
    return {op: tuple(e for e in entries if e.name not in names) for op, entries in OPS.items()}


@pytest.fixture(params=["sm90", "gfx942"])
def context(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerContext:
    return context_for(request.param, without("aiter", "flash_mla"), monkeypatch)


@pytest.fixture(params=["sm90", "gfx942", "gfx942 aiter", "gfx950 aiter"])
def any_context(
    request: pytest.FixtureRequest, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LayerContext]:
    """With aiter, too."""
    arch, _, library = request.param.partition(" ")
    if not library:
        yield context_for(arch, without("aiter", "flash_mla"), monkeypatch)
        return
    with probe.replaced(aiter(arch, seen)):
        yield context_for(arch, without("flash_mla"), monkeypatch)


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
    seen: Launches,
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
    step = Step.of(config)
    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", lambda kernel, *_, **__: seen.launched(kernel))
    for _ in range(2):  # the first layer of a step makes what all of them share
        seen.names.clear()
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
    layer_id: int, context: LayerContext, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    layer = DeepseekV3DecoderLayer(KIMI, layer_id, context, f"model.layers.{layer_id}")
    rotary = RotaryEmbedding(KIMI, 64, context, interleaved=True)
    return launches(layer, rotary, KIMI, context, seen, monkeypatch)


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
    quant = OnlineConfig("int4", ("*.self_attn", "*.shared_experts"))
    context = replace(any_context, quant=quant)
    assert_at_most(18, kimi_launches(1, context, seen, monkeypatch))


def test_of_a_kimi_layer(
    any_context: LayerContext, seen: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_at_most(18, kimi_launches(1, any_context, seen, monkeypatch))
