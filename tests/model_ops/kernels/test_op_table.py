"""Every line of the op table: what it names exists, and does what its op does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fake_aiter import FakeAiter
from fake_flash_mla import FakeFlashMLA

from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter.quant import FP8_CHANNEL, INT8_CHANNEL
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import linear as torch_linear
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import (
    PACKED,
    PLAIN,
    Implementation,
    OpQuery,
    OpTable,
    OpUnavailableError,
)
from atom.platform import Platform, cpu_platform, current_platform

MI300X = Platform("rocm", "gfx942", True)
H100 = Platform("cuda", "sm90", True)

# Sizes that every implementation takes.
SIZES = {
    "size": 512,
    "other_size": 128,
    "num_ranks": 2,
    "peer_access": 1,
    "in_features": 256,
    "out_features": 256,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 128,
    "block_size": 64,
    "num_blocks": 100,
    "sliding_window": 0,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_experts": 8,
    "top_k": 2,
    "elsewhere": 0,
    "num_groups": 1,
    "softmax": 0,
    "pair_scores": 0,
    "has_bias": 0,
    "has_shared": 0,
    "hidden_size": 256,
    "intermediate_size": 256,
    "vocab_size": 64,
    "key_dim": 128,
}


QUANTISED = (
    *("quant_linear", "quant_embedding", "quant_experts", "quant_logits"),
    *("add_rms_norm_quantise", "rms_norm_pair_quantise"),
)


@pytest.mark.parametrize(
    ("op", "entry"),
    [pytest.param(op, e, id=f"{op}-{e.name}-{e.layout}") for op, all_ in OPS.items() for e in all_],
)
def test_every_line_of_the_table_answers_and_resolves(op: str, entry: Implementation) -> None:
    """What it names exists: the function that refuses a query, and the one that runs."""
    if entry.name in ("triton", "gluon"):
        pytest.importorskip("triton")
    platforms = {"aiter": MI300X, "gluon": MI300X, "native": cpu_platform(), "flash_mla": H100}
    platform = platforms.get(entry.name, current_platform())
    if entry.layout == PACKED:  # for aiter's sake alone
        platform = MI300X
    dtype = torch.float32 if op == "moe_route" else torch.bfloat16
    weights = None
    if op in QUANTISED:  # native kernels multiply codes of integers
        is_packed = entry.name == "native" and not entry.dequantises
        weights = INT8_CHANNEL if is_packed else FP8_CHANNEL
        if entry.name == "native" and op.endswith("experts") and not is_packed:
            weights = replace(weights, activations=None)
    library = FakeFlashMLA().library if entry.name == "flash_mla" else FakeAiter().library
    with probe.replaced(library):
        query = OpQuery(
            platform, dtype, SIZES, torch.bfloat16, weights, batch_invariant=entry.batch_invariant
        )
        reason = entry.supports(query)
        by_triton = op in ("quant_linear", "quant_experts") and entry.name == "triton"
        takes_rounded = by_triton or (op, entry.name) == ("quant_linear", "aiter")
        assert entry.takes_rounded(query) == takes_rounded
        assert entry.takes_plain == ((op, entry.name) == ("quant_experts", "triton"))
    *_, reference = [other for other in OPS[op] if other.name == "torch"]
    parameters = inspect.signature(entry.load()).parameters
    theirs = inspect.signature(reference.load()).parameters
    assert list(parameters) == list(theirs)[: len(parameters)]
    # An implementation refuses to be chosen for what it does not take.
    rest = [theirs[name] for name in list(theirs)[len(parameters) :]]
    assert all(parameter.default is not parameter.empty for parameter in rest)
    if entry.load_into is not None:
        into = inspect.signature(entry.load_into()).parameters
        assert list(into) == [*parameters, "out"]
    # Unified attention leaves layers with one query head a KV head to the packed line.
    is_left_to_packed = (op, entry.name, entry.layout) == ("paged_attention", "aiter", PLAIN)
    assert is_left_to_packed or reason is None or reason == native_build().reason


GPUS = [MI300X, Platform("rocm", "gfx90a", True), H100]


@pytest.mark.parametrize("platform", GPUS, ids=lambda platform: platform.arch)
def test_each_op_has_a_batch_invariant_implementation_on_a_gpu(platform: Platform) -> None:
    """None of them aiter's or Gluon's, nor a product of a library."""
    pytest.importorskip("triton")
    table = OpTable(platform, OPS, batch_invariant=True)
    with probe.replaced(FakeAiter().library):
        # With this gate they are PyTorch's, by products of a library.
        with pytest.raises(
            OpUnavailableError, match=r"has no clamped gate(.|\n)*torch: not batch-invariant"
        ):
            table.resolve_weights("moe_experts", torch.bfloat16, None, **SIZES, clamped=1)
        for op in OPS:
            dtype = torch.float32 if op == "moe_route" else torch.bfloat16
            if op in QUANTISED:
                table.resolve_weights(op, dtype, FP8_CHANNEL, **SIZES)
            else:
                table.resolve(op, dtype, torch.bfloat16, **SIZES)
    chosen = {op: name for op, name, *_ in map(str.split, table.describe().splitlines()[1:])}
    computed_by_torch = {op for op in OPS if chosen[op] == "torch"}
    assert {chosen[op] for op in OPS} == {"triton", "torch"}
    assert computed_by_torch == {
        *("all_reduce", "all_reduce_add_rms_norm", "add", "sigmoid", "embedding"),
        *("gelu_and_mul", "scale", "softcap", "mul_sigmoid", "layer_norm", "window_places"),
        *("mla_write_and_decode", "scale_by_position", "mrope_table"),
    }


@pytest.mark.parametrize(("gate", "chosen"), [("situ", "triton"), ("clamped", "torch")])
def test_experts_with_another_gate_run_where_there_is_one(gate: str, chosen: str) -> None:
    pytest.importorskip("triton")
    with probe.replaced(FakeAiter().library):
        table = OpTable(MI300X, OPS)
        choice = table.resolve_weights("moe_experts", torch.bfloat16, None, **SIZES, **{gate: 1})
    assert choice.name == chosen
    assert f"has no {gate} gate" in dict(choice.passed_over)["aiter"]


def test_products_are_left_to_a_library_otherwise() -> None:
    pytest.importorskip("triton")
    table = OpTable(GPUS[-1], OPS)
    for op in ("linear", "logits"):
        assert table.resolve_weights(op, torch.bfloat16, None, **SIZES).name == "torch"
    for op in ("quant_logits", "quant_embedding"):
        assert table.resolve_weights(op, torch.bfloat16, FP8_CHANNEL, **SIZES).name == "torch"


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (lambda x, w, **_: (x.double() @ w.double()).float(), None),
        (lambda x, w, **_: (x.double() @ w.double()).bfloat16().float(), "is off by"),
        (lambda x, w, **_: x @ w, "is off by"),
        (lambda x, w, **_: torch.full((len(x), w.shape[1]), torch.nan), "is off by"),
    ],
    ids=["float32", "rounded", "narrow", "nan"],
)
def test_a_product_with_wide_results_is_compared(
    product: Callable[..., torch.Tensor], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", product)
    found = torch_linear.wide_product_fault.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert (found is None) == (why is None)
    assert why is None or f"torch.mm with float32 results {why}" in str(found)


def test_a_product_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("hipBLASLt has no such kernel\nand more")

    monkeypatch.setattr(torch, "mm", fail)
    found = torch_linear.wide_product_fault.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert found == "torch.mm with float32 results fails: hipBLASLt has no such kernel"


def test_logits_of_a_library_that_cannot_are_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the table says why."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch_linear, "wide_product_fault", lambda *_: "rounds in between")
    table = OpTable(GPUS[1], OPS)
    assert table.resolve("logits", torch.bfloat16, **SIZES).__module__.endswith(
        "triton.products.linear"
    )
    choice = table.resolve_weights("quant_logits", torch.bfloat16, FP8_CHANNEL, **SIZES)
    assert choice.name == "triton"
    assert table.describe().count("rounds in between") == 2
    assert table.resolve_weights("linear", torch.bfloat16, None, **SIZES).name == "torch"


def test_a_cpu_runs_its_kernels_or_names_the_op_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dtypes = torch.bfloat16, torch.bfloat16
    if native_build().reason is None:
        table = OpTable(cpu_platform(), OPS, batch_invariant=True)
        for op in ("linear", "logits", "paged_attention", "mla_prefill", "moe_experts"):
            table.resolve(op, *dtypes, **SIZES)
        assert table.summary().endswith("kernels: native 5")
    without = {op: tuple(e for e in all_ if e.name != "native") for op, all_ in OPS.items()}
    with pytest.raises(
        OpUnavailableError, match=r"no batch-invariant implementation of linear .* torch: not batch"
    ):
        OpTable(cpu_platform(), without, batch_invariant=True).resolve("linear", *dtypes, **SIZES)
