"""A norm that quantises its result has the bits of the norm, then the quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from aiter_quant_cases import clone, fake_of, random_weights
from test_triton_quant_linear import AS_NUMBERS, IN_CODES, platforms_on
from test_triton_quant_linear import random_weights as tile_weights
from test_triton_quantise import HOW, inputs

from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.model_ops.kernels.aiter.quant import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_POWER_BLOCKS,
    FP8_STATIC,
    INT8_CHANNEL,
    MXFP4,
)
from atom.model_ops.kernels.aiter.quant_linear import takes_rounded
from atom.model_ops.kernels.triton import rms_norm
from atom.model_ops.kernels.triton.products import quant_linear
from atom.model_ops.kernels.triton.products.norm_quantise import (
    add_rms_norm_quantise,
    refuses_add,
    refuses_pair,
    rms_norm_pair_quantise,
)
from atom.model_ops.kernels.triton.products.quant_layout import prepare_tiles
from atom.model_ops.kernels.triton.products.quantise import round_rows
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.formats.fp8 import Fp8Config
from atom.model_ops.quant.rounding import InputRounding, QuantInputs, Rows, unrounded
from atom.model_ops.quant.weights import Activations, WeightFormat
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import Platform, current_platform

SIZE, EPS = 256, 1e-5
H200 = Platform("cuda", "sm90", True)
BLOCKS = Fp8Config(True, False, False, frozenset(), {})


def roundings(device: torch.device) -> Iterator[InputRounding]:
    """Every quantisation: its codes, with padding, and what products of numbers read."""
    one = torch.tensor(0.02, device=device)
    for how in HOW:
        yield InputRounding(how, one, form="codes", multiple=128)
        yield InputRounding(how, one, form="products" if how.group else "numbers")


def random(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def assert_same(got: Rows, wanted: QuantInputs) -> None:
    assert isinstance(got, QuantInputs)
    assert (got.group, got.dtype) == (wanted.group, wanted.dtype)
    pairs = [(got.numbers, wanted.numbers)]
    if wanted.scale is None:
        assert got.scale is None
    else:
        assert got.scale is not None
        pairs.append((got.scale, wanted.scale))
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_its_norm_and_codes(dtype: torch.dtype, device: torch.device) -> None:
    """Rows of many magnitudes and one of zeros; the sums' rows lie apart."""
    x = inputs(dtype).to(device)
    residual = (x + random(5, 608, seed=1, dtype=dtype, device=device)[:, ::2]).T.contiguous().T
    residual[3] = 0
    weight = random(304, seed=2, dtype=dtype, device=device)
    normed, total = rms_norm.add_rms_norm(x, residual, weight, EPS)
    for rounding in roundings(device):
        got, summed = add_rms_norm_quantise(x, residual, weight, EPS, rounding, None)
        assert_same(got, round_rows(normed, rounding))
        assert torch.equal(summed, total)
        assert got.rows is None
        kept, _ = add_rms_norm_quantise(
            x, residual, weight, EPS, replace(rounding, keeps_rows=True), None
        )
        assert_same(kept, got)
        assert torch.equal(unrounded(kept), normed)


@pytest.mark.parametrize("sizes", [(304, 40), (72, 200)])
def test_norms_of_two_parts_of_a_row(sizes: tuple[int, int], device: torch.device) -> None:
    dtype = torch.bfloat16
    x = random(3, sum(sizes) + 24, seed=1, dtype=dtype, device=device)
    weights = [random(n, seed=n, dtype=dtype, device=device) for n in sizes]
    normed, other = rms_norm.rms_norm_pair(x, *weights, EPS, None)
    for rounding in roundings(device):
        got, same = rms_norm_pair_quantise(x, *weights, EPS, rounding, None)
        assert_same(got, round_rows(normed, rounding))
        assert torch.equal(same, other)


def test_no_rows(device: torch.device) -> None:
    x = torch.zeros(0, 300, device=device)
    weight, rounding = torch.ones(200, device=device), InputRounding(Activations("fp8", 128), None)
    out, total = add_rms_norm_quantise(x[:, :200], x[:, :200], weight, EPS, rounding, None)
    assert (out.shape, total.shape) == ((0, 200), (0, 200))
    out, other = rms_norm_pair_quantise(x, weight, weight[:100], EPS, rounding, None)
    assert (out.shape, other.shape) == ((0, 200), (0, 100))


@pytest.mark.parametrize("form", [*IN_CODES, *AS_NUMBERS], ids=str)
def test_a_product_reads_what_the_norm_made(form: WeightFormat, device: torch.device) -> None:
    x = random(3, 200, seed=1, dtype=torch.bfloat16, device=device)
    weight = random(200, seed=2, dtype=torch.bfloat16, device=device)
    for platform in platforms_on(device):
        weights = prepare_tiles(tile_weights(form, device=device), platform)
        rounding = weights.rounding
        assert rounding is not None
        made, _ = add_rms_norm_quantise(x, x, weight, EPS, rounding, None)
        normed, _ = rms_norm.add_rms_norm(x, x, weight, EPS)
        got, wanted = (
            quant_linear.product(platform.kind, rows, weights, None) for rows in (made, normed)
        )
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, wanted)


def test_inputs_in_another_order_are_left_to_the_product(device: torch.device) -> None:
    form = WeightFormat("int4", has_row_scale=True, activations=Activations("int8"))
    weights = tile_weights(form, device=device)
    weights.column_order = torch.arange(199, -1, -1, device=device)
    assert prepare_tiles(weights, H200).rounding is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "form", [FP8_BLOCK, FP8_POWER_BLOCKS[1], FP8_CHANNEL, FP8_STATIC, INT8_CHANNEL], ids=str
)
def test_products_of_aiter_read_it_as_well(form: WeightFormat, arch: str) -> None:
    """gfx942 has its own FP8."""
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    x = random(3, 256, seed=1, dtype=dtype, device=cpu)
    weight = random(256, seed=2, dtype=dtype, device=cpu)
    with fake_of(arch) as aiter:
        sizes = {"in_features": 256, "out_features": 96}
        choice = aiter.ops.resolve_weights("quant_linear", dtype, form, **sizes)
        assert choice.takes_rounded
        assert choice.prepare is not None
        weights = choice.prepare(clone(random_weights(form, 96, 256), cpu), dtype)
        made, _ = add_rms_norm_quantise(x, x, weight, EPS, weights.rounding, None)
        normed, _ = rms_norm.add_rms_norm(x, x, weight, EPS)
        assert torch.equal(*(choice.function(rows, weights, None) for rows in (made, normed)))


def test_scales_that_are_shuffled_are_left_to_aiter() -> None:
    query = OpQuery(Platform("rocm", "gfx950", True), torch.bfloat16, {}, weights=MXFP4)
    assert not takes_rounded(query)
    assert takes_rounded(replace(query, weights=FP8_BLOCK))


def query_of(size: int, group: int = 128, **shape: int) -> OpQuery:
    form = replace(FP8_BLOCK, activations=Activations("fp8", group))
    return OpQuery(H200, torch.bfloat16, {"size": size, **shape}, weights=form)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for refuses in (refuses_add, refuses_pair):
        assert refuses(query_of(7168)) is None
        assert refuses(query_of(65)) is None
        assert refuses(query_of(64)) == "size=64 is below 65, for groups and padding of 128"
        assert refuses(query_of(256, 512)) == "size=256 is below 257, for groups and padding of 512"
        assert refuses(query_of(16385)) == "size=16385 is larger than 16384"
    assert "16400" in str(refuses_pair(query_of(512, other_size=16400)))
    monkeypatch.setenv("ATOM_OP_ADD_RMS_NORM", "torch")
    assert "ATOM_OP_ADD_RMS_NORM=torch" in str(refuses_add(query_of(512)))
    assert refuses_pair(query_of(512)) is None


class Doubles:
    """Collectives of two ranks that have the same."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def layer_and_norm(
    monkeypatch: pytest.MonkeyPatch, how: str, device: torch.device, ranks: int
) -> tuple[ReplicatedLinear, ResidualRMSNorm]:
    """A linear layer in FP8 and the norm that feeds it; `how` runs the norm that quantises."""
    for op in ("RMS_NORM", "ADD_RMS_NORM", "QUANT_LINEAR"):
        monkeypatch.setenv(f"ATOM_OP_{op}", "triton")
    monkeypatch.setenv("ATOM_OP_ADD_RMS_NORM_QUANTISE", how)
    group = ParallelGroup(0, ranks, Doubles()) if ranks > 1 else SINGLE
    context = context_on(device, group)
    layer = ReplicatedLinear(SIZE, 96, False, context, "a.qkv_proj")
    norm = ResidualRMSNorm(SIZE, EPS, context, layer)
    norm.weight.data.copy_(random(SIZE, seed=3, dtype=torch.bfloat16, device=device))
    codes = random(96, SIZE, seed=4, dtype=torch.float32, device=device)
    layer.load_weight("weight", codes.to(torch.float8_e4m3fn), None)
    layer.load_weight("weight_scale_inv", torch.tensor([[0.5, 1.25]]), None)
    layer.process_after_loading()
    return layer, norm


def context_on(device: torch.device, group: ParallelGroup = SINGLE) -> LayerContext:
    ops = OpTable(current_platform(), OPS)
    return LayerContext(torch.bfloat16, device, ops, 8, group, quant=BLOCKS)


@pytest.mark.parametrize("ranks", [1, 2])
@torch.inference_mode()
def test_a_layer_is_fed_the_same(
    ranks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks the sum is quantised; `add` still gives rows."""
    partial = random(3, SIZE, seed=1, dtype=torch.bfloat16, device=device)
    residual = random(3, SIZE, seed=2, dtype=torch.bfloat16, device=device)
    outputs = []
    for how in ("triton", "torch"):
        layer, norm = layer_and_norm(monkeypatch, how, device, ranks)
        fed, total = norm.feed(partial.clone(), residual)
        assert isinstance(fed, QuantInputs) == (how == "triton")
        rows, same = norm.add(partial.clone(), residual)
        assert torch.equal(total, ranks * partial + residual)
        assert torch.equal(total, same)
        assert torch.equal(layer(rows), layer(fed))
        outputs.append(layer(fed))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("product", "norm", "said"),
    [
        ("triton", "triton", "add_rms_norm_quantise  triton"),
        ("triton", "torch", "the norm alone: products round their inputs"),
        ("torch", "torch", None),
    ],
)
def test_the_table_says_what_runs(
    product: str,
    norm: str,
    said: str | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product that reads rows has no norm that quantises."""
    monkeypatch.setenv("ATOM_OP_QUANT_LINEAR", product)
    monkeypatch.setenv("ATOM_OP_ADD_RMS_NORM_QUANTISE", norm)
    context = context_on(device)
    ResidualRMSNorm(SIZE, EPS, context, ReplicatedLinear(SIZE, 96, False, context, "a.qkv_proj"))
    table = context.ops.describe()
    assert said in table if said is not None else "rms_norm_quantise" not in table
