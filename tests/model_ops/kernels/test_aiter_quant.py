"""aiter's quantised products against float64 references: over the fake, and over aiter.

Inputs are such that quantising them loses nothing, so that errors are those of a wrong layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from aiter_cases import BF16, Aiter, aiters, check
from fake_aiter import AITER, FakeAiter
from fake_aiter_layouts import shuffled_scale, shuffled_weight
from fake_aiter_quant import E2M1, fp8_of

from atom.model_ops.kernels.aiter import probe, quant_experts, quant_linear
from atom.model_ops.kernels.aiter.quant import (
    FP8_BLOCKS,
    FP8_CHANNEL,
    FP8_POWER_BLOCKS,
    FP8_STATIC,
    INT8_CHANNEL,
    MXFP4,
)
from atom.model_ops.quant.weights import QuantWeights, WeightFormat, dequantise, pack_nibbles
from atom.model_ops.registry import OpTable, OpUnavailableError
from atom.platform import Platform

LINEAR = {
    "blocks": FP8_BLOCKS[0],
    "blocks of powers": FP8_BLOCKS[1],
    "powers for inputs": FP8_POWER_BLOCKS[1],
    "channels": FP8_CHANNEL,
    "static": FP8_STATIC,
    "int8": INT8_CHANNEL,
    "mxfp4": MXFP4,
}
EXPERTS = {"blocks": FP8_BLOCKS[0], "channels": FP8_CHANNEL, "mxfp4": MXFP4}
CALLED = {
    "blocks": ("per_group_quant_hip", "gemm_a8w8_blockscale"),
    "blocks of powers": ("per_group_quant_hip", "gemm_a8w8_blockscale"),
    "powers for inputs": ("per_group_quant_hip", "gemm_a8w8_blockscale"),
    "channels": ("shuffle_weight", "per_token_quant_hip", "gemm_a8w8_bpreshuffle"),
    "static": ("shuffle_weight", "static_per_tensor_quant", "gemm_a8w8_bpreshuffle"),
    "int8": ("per_token_quant_hip", "gemm_a8w8"),
    "mxfp4": ("shuffle_weight", "e8m0_shuffle", "per_1x32_f4_quant_hip", "gemm_a4w4"),
}
ON_BOTH = [(a, n) for a in ("gfx942", "gfx950") for n in LINEAR if (a, n) != ("gfx942", "mxfp4")]


@contextmanager
def fake_of(arch: str) -> Iterator[Aiter]:
    fake = FakeAiter(arch=arch)
    with probe.replaced(fake.library):
        yield Aiter(OpTable(Platform("rocm", arch, True), AITER), torch.device("cpu"), fake)


def random_weights(form: WeightFormat, *shape: int, seed: int = 0) -> QuantWeights:
    """[..., out, in] with all kinds of codes, -0 among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    leading, (out, size) = shape[:-2], shape[-2:]
    if form.codes == "int8":
        codes = (numbers * 40).clamp(-128, 127).to(torch.int8)
    elif form.codes == "fp4":
        codes = pack_nibbles(torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator))
    else:
        numbers[..., ::5] = -0.0
        codes = (numbers * 90).clamp(-448, 448).to(torch.float8_e4m3fn)
    weights = QuantWeights(form, codes)
    if form.columns:
        blocks = *leading, -(-out // form.rows), size // form.columns
        exponents = torch.randint(124, 131, blocks, dtype=torch.uint8, generator=generator)
        factors = torch.rand(blocks, generator=generator) + 0.5
        weights.scale = exponents if form.scale_type == "e8m0" else factors.to(BF16)
    else:
        weights.row_scale = torch.rand(*leading, out, generator=generator) + 0.5
    if form.activations is not None and form.activations.is_static:
        weights.input_scale = torch.tensor(0.25)
    return weights


def clone(weights: QuantWeights, device: torch.device) -> QuantWeights:
    """On the device; preparing converts in place."""
    return replace(weights, **{n: x.to(device, copy=True) for n, x in weights.tensors().items()})


def exact_inputs(weights: QuantWeights, arch: str, tokens: int) -> torch.Tensor:
    """[tokens, in] bfloat16: numbers of the codes, the largest among each group, times powers."""
    how, size = weights.format.activations, weights.shape[1]
    assert how is not None
    generator = torch.Generator().manual_seed(9)
    group = how.group or size
    shape = tokens, size // group, group
    if how.codes == "fp4":
        numbers = E2M1[torch.randint(0, 8, shape, generator=generator)]
        numbers = numbers * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)
        limit = 6.0
    elif how.codes == "int8":
        numbers = torch.randint(-127, 128, shape, generator=generator).float()
        limit = 127.0
    else:
        limit = torch.finfo(fp8_of(arch)).max
        numbers = torch.randn(shape, generator=generator) * limit / 4
        numbers = numbers.clamp(-limit, limit).to(fp8_of(arch)).float()
    numbers[..., 3] = limit
    powers = torch.randint(-6, 3, (tokens, size // group, 1), generator=generator).float().exp2()
    if weights.input_scale is not None:
        powers = weights.input_scale * (2 if arch == "gfx942" else 1)
    return (numbers * powers).flatten(1).to(BF16)


def check_linear(aiter: Aiter, name: str, shape: tuple[int, int] = (96, 256)) -> None:
    form, arch = LINEAR[name], aiter.ops.platform.arch
    weights = random_weights(form, *shape)
    choice = aiter.ops.resolve_weights(
        "quant_linear", BF16, form, in_features=shape[1], out_features=shape[0]
    )
    assert choice.prepare is not None
    prepared = choice.prepare(clone(weights, aiter.device), BF16)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(1)).to(BF16)
    for tokens in (1, 40):
        x = exact_inputs(weights, arch, tokens)
        wanted = x.double() @ dequantise(weights, torch.float64).T
        for given in (None, bias):
            there = None if given is None else given.to(aiter.device)
            out = choice.function(x.to(aiter.device), prepared, there)
            check(out.cpu(), wanted if given is None else wanted + given.double())
    assert choice.function(x.to(aiter.device).view(2, 20, -1), prepared, None).shape[:2] == (2, 20)


@pytest.mark.parametrize(("arch", "name"), ON_BOTH)
def test_products(arch: str, name: str) -> None:
    with fake_of(arch) as aiter:
        check_linear(aiter, name)
        asked = ("get_gfx",) if name not in ("int8", "mxfp4") else ()
        aiter.called(*CALLED[name], *asked)


def test_blocks_that_are_cut_off() -> None:
    """576 outputs, as of DeepSeek's latents, are four and a half blocks."""
    with fake_of("gfx942") as aiter:
        check_linear(aiter, "blocks", (576, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEAR)
def test_products_on_a_device(name: str) -> None:
    for aiter in aiters("real"):
        if name == "mxfp4" and aiter.ops.platform.arch != "gfx950":
            pytest.skip("MXFP4 is gfx950's")
        check_linear(aiter, name, (256, 512))


@pytest.mark.parametrize("name", ["channels", "mxfp4"])
def test_row_major_weights_would_give_garbage(name: str) -> None:
    """The fake reads codes and scales where aiter's kernels do."""
    weights = random_weights(LINEAR[name], 96, 256)
    x = exact_inputs(weights, "gfx950", 5)
    wanted = x.double() @ dequantise(weights, torch.float64).T
    with fake_of("gfx950"):
        prepared = quant_linear.prepare_linear(clone(weights, torch.device("cpu")), BF16)
        check(quant_linear.quant_linear(x, prepared, None), wanted)
        wrong = [replace(prepared, codes=weights.codes.view(prepared.codes.dtype))]
        if weights.scale is not None:
            padded = F.pad(weights.scale, (0, 0, 0, 256 - 96))
            wrong.append(replace(prepared, scale=padded.view(prepared.scale.dtype)))
        for other in wrong:
            out = quant_linear.quant_linear(x, other, None)
            assert (out.double() - wanted).abs().max() > wanted.abs().max() / 4


def test_static_inputs_saturate() -> None:
    for arch in ("gfx942", "gfx950"):
        weights = random_weights(FP8_STATIC, 32, 256)
        x = exact_inputs(weights, arch, 3)
        x[1] = x[1].sign() * x.abs().max()
        wanted = x.double() @ dequantise(weights, torch.float64).T
        x[1] *= 100
        with fake_of(arch):
            prepared = quant_linear.prepare_linear(clone(weights, torch.device("cpu")), BF16)
            check(quant_linear.quant_linear(x, prepared, None), wanted)


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
    ("arch", "name"), [(arch, name) for arch, name in ON_BOTH if name in EXPERTS]
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


def test_layouts_are_shuffled_apart_from_each_other() -> None:
    """The fake's own layouts: a tile of weights, and of scales."""
    weight = torch.arange(16 * 32, dtype=torch.int16).view(16, 32)
    assert shuffled_weight(weight).flatten()[:18].tolist() == [*range(8), *range(32, 40), 64, 65]
    scale = torch.arange(256, dtype=torch.uint8).view(32, 8)
    places = shuffled_scale(scale).flatten()[:10].tolist()
    assert places == [0, 128, 4, 132, 8, 136, 12, 140, 16, 144]


@pytest.mark.parametrize(
    ("arch", "name", "sizes", "reason"),
    [
        ("gfx942", "mxfp4", (96, 256), "gfx942 does not multiply MXFP4, gfx950 does"),
        ("gfx950", "mxfp4", (96, 128), "in_features=128 is no multiple of 256"),
        ("gfx950", "mxfp4", (24, 256), "tiles of 16 x 32, not weights of 24 x 128"),
        ("gfx942", "blocks", (96, 192), "in_features=192 is no multiple of 128"),
        ("gfx942", "blocks", (90, 256), "out_features=90 is no multiple of 16"),
        ("gfx942", "channels", (96, 128), "in_features=128 is below 192"),
        ("gfx942", "channels", (24, 256), "tiles of 16 x 32, not weights of 24 x 256"),
        ("gfx942", "int8", (96, 40), "in_features=40 is no multiple of 16"),
    ],
)
def test_products_that_aiter_has_not(
    arch: str, name: str, sizes: tuple[int, int], reason: str
) -> None:
    with fake_of(arch) as aiter, pytest.raises(OpUnavailableError, match=reason):
        aiter.ops.resolve_weights(
            "quant_linear", BF16, LINEAR[name], out_features=sizes[0], in_features=sizes[1]
        )


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


def test_a_format_without_a_kernel_is_refused() -> None:
    form = WeightFormat("int4", 1, 128)
    with fake_of("gfx950") as aiter, pytest.raises(OpUnavailableError) as error:
        aiter.ops.resolve_weights("quant_linear", BF16, form, in_features=256, out_features=96)
    assert "not int4 group 128 weight-only" in str(error.value)
