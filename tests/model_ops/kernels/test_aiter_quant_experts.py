"""aiter's quantised experts against float64 references: over the fake, and over aiter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from aiter_cases import BF16, Aiter, aiters, check
from aiter_quant_cases import clone, exact_inputs, fake_of, random_weights
from fake_aiter import FakeAiter

from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter import quant_experts
from atom.model_ops.kernels.aiter.quant import (
    FP8_BLOCKS,
    FP8_CHANNEL,
    FP8_POWER_BLOCKS,
    INT8_CHANNEL,
    MXFP4,
)
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.model_ops.ops import OPS
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.weights import QuantWeights, WeightFormat, dequantise
from atom.model_ops.registry import OpTable, OpUnavailableError
from atom.platform import Platform, cpu_platform

EXPERTS = {"blocks": FP8_BLOCKS[0], "channels": FP8_CHANNEL, "mxfp4": MXFP4}


def sum_experts(
    x: torch.Tensor, w13: QuantWeights, w2: QuantWeights, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """float64, nothing but weights rounded."""
    first, second = (dequantise(w, torch.float64) for w in (w13, w2))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (first[expert] @ x[token].double()).chunk(2)
            out[token] += weight * (second[expert] @ (F.silu(gate) * up))
    return out


# What rounding between the products costs, of the largest result.
TOLERANCES = {"blocks": 2**-4, "channels": 2**-4, "mxfp4": 2**-2}


def expert_case(
    name: str, arch: str
) -> tuple[QuantWeights, QuantWeights, torch.Tensor, torch.Tensor, torch.Tensor]:
    form = EXPERTS[name]
    w13, w2 = random_weights(form, 4, 512, 256), random_weights(form, 4, 256, 256, seed=1)
    x = exact_inputs(w13, arch, 20)
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(20)])
    return w13, w2, x, torch.rand(20, 2, generator=generator), ids


def check_experts(aiter: Aiter, name: str) -> None:
    w13, w2, x, weights, ids = expert_case(name, aiter.ops.platform.arch)
    sizes = {"num_experts": 4, "hidden_size": 256, "intermediate_size": 256}
    choice = aiter.ops.resolve_weights("quant_experts", BF16, w13.format, **sizes)
    assert choice.prepare is not None
    prepared = choice.prepare(clone(w13, aiter.device), clone(w2, aiter.device), BF16)
    wanted = sum_experts(x, w13, w2, weights, ids)
    there = [each.to(aiter.device) for each in (x, weights, ids)]
    check(choice.function(there[0], *prepared, *there[1:]).cpu(), wanted, TOLERANCES[name])


@pytest.mark.parametrize(
    ("arch", "name"),
    [*(("gfx950", n) for n in EXPERTS), ("gfx942", "blocks"), ("gfx942", "channels")],
)
def test_experts(arch: str, name: str) -> None:
    with fake_of(arch) as aiter:
        check_experts(aiter, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_on_a_device(name: str) -> None:
    for aiter in aiters("real"):
        if name == "mxfp4" and aiter.ops.platform.arch != "gfx950":
            pytest.skip("MXFP4 is gfx950's")
        check_experts(aiter, name)


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("which", [0, 1])
def test_row_major_experts_would_give_garbage(name: str, which: int) -> None:
    given = expert_case(name, "gfx950")
    wanted = sum_experts(given[2], *given[:2], *given[3:])
    with fake_of("gfx950"):
        cpu = torch.device("cpu")
        copies = clone(given[0], cpu), clone(given[1], cpu)
        prepared = list(quant_experts.prepare_experts(*copies, BF16))
        codes = given[which].codes.view(prepared[which].codes.dtype)
        codes.is_shuffled = True
        prepared[which] = replace(prepared[which], codes=codes)
        out = quant_experts.quant_experts(given[2], *prepared, *given[3:])
    assert (out.double() - wanted).abs().max() > wanted.abs().max() / 2


def loaded_experts(ops: OpTable) -> FusedMoE:
    """A layer of FP8 blocks, filled as a checkpoint fills it."""
    config = parse_quantization({"quant_method": "fp8", "weight_block_size": [128, 128]}, {})
    context = LayerContext(torch.float32, torch.device("cpu"), ops, 8, quant=config)
    layer = FusedMoE(4, 256, 128, context, "experts")
    for expert in range(4):
        for part, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
            weights = random_weights(FP8_BLOCKS[0], *shape, seed=ord(part[0]) + expert)
            assert weights.scale is not None
            stored = {"weight": weights.codes, "weight_scale_inv": weights.scale.float() / 100}
            for name, tensor in stored.items():
                place = layer.place_weight(f"{expert}.{part}_proj.{name}")
                assert place is not None
                layer.load_weight(place[0], tensor, place[1])
    layer.process_after_loading()
    return layer


def test_a_layer_of_experts_is_prepared_when_loaded() -> None:
    """On gfx950, whose FP8 is the checkpoint's: as torch computes it."""
    ids = torch.tensor([[0, 2], [3, 1], [2, 3]])
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(3, 256, generator=generator), torch.rand(3, 2, generator=generator), ids
    platform, fake = Platform("rocm", "gfx950", True), FakeAiter(torch.float32, arch="gfx950")
    with probe.replaced(fake.library):
        registry = {op: tuple(e for e in OPS[op] if e.name != "triton") for op in OPS}
        out = loaded_experts(OpTable(platform, registry))(*given)
    assert {"shuffle_weight", "fused_moe"} <= fake.names
    check(out, loaded_experts(OpTable(cpu_platform(), OPS))(*given))


@pytest.mark.parametrize(
    ("arch", "form", "size", "reason"),
    [
        ("gfx942", MXFP4, 256, "gfx942 does not multiply MXFP4"),
        ("gfx950", MXFP4, 384, "intermediate_size=384 is no multiple of 256"),
        ("gfx950", FP8_BLOCKS[0], 192, "intermediate_size=192 is no multiple of 128"),
        ("gfx950", INT8_CHANNEL, 256, "not int8 channel x int8 per token"),
        ("gfx950", FP8_POWER_BLOCKS[0], 256, "not fp8 block 128x128 x fp8 per group 128 e8m0"),
    ],
)
def test_quantised_experts_that_aiter_has_not(
    arch: str, form: WeightFormat, size: int, reason: str
) -> None:
    sizes = {"num_experts": 4, "hidden_size": 256, "intermediate_size": size}
    with fake_of(arch) as aiter, pytest.raises(OpUnavailableError, match=reason):
        aiter.ops.resolve_weights("quant_experts", BF16, form, **sizes)
