"""aiter's quantised products against float64 references: over the fake, and over aiter.

Inputs are such that quantising them loses nothing, so that errors are those of a wrong layout.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from aiter_cases import BF16, Aiter, aiters, check
from aiter_quant_cases import clone, exact_inputs, fake_of, random_weights
from fake_aiter_layouts import shuffled_scale, shuffled_weight

from atom.model_ops.kernels.aiter import quant_linear
from atom.model_ops.kernels.aiter.quant import (
    FP8_BLOCKS,
    FP8_CHANNEL,
    FP8_POWER_BLOCKS,
    FP8_STATIC,
    INT8_CHANNEL,
    MXFP4,
)
from atom.model_ops.quant.weights import WeightFormat, dequantise
from atom.model_ops.registry import OpUnavailableError

LINEAR = {
    "blocks": FP8_BLOCKS[0],
    "blocks of powers": FP8_BLOCKS[1],
    "powers for inputs": FP8_POWER_BLOCKS[1],
    "channels": FP8_CHANNEL,
    "static": FP8_STATIC,
    "int8": INT8_CHANNEL,
    "mxfp4": MXFP4,
}
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


def skip_unless_interpreted(name: str) -> None:
    """Triton multiplies FP8 blocks by few inputs, and the fake's tensors are on a CPU."""
    if name in ("blocks", "blocks of powers") and torch.cuda.is_available():
        pytest.skip("interpreted only; a GPU runs test_products_on_a_device")


@pytest.mark.parametrize(("arch", "name"), ON_BOTH)
def test_products(arch: str, name: str) -> None:
    skip_unless_interpreted(name)
    with fake_of(arch) as aiter:
        check_linear(aiter, name)
        aiter.called(*CALLED[name])


def test_blocks_that_are_cut_off() -> None:
    """576 outputs, as of DeepSeek's latents, are four and a half blocks."""
    skip_unless_interpreted("blocks")
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


def test_a_format_without_a_kernel_is_refused() -> None:
    form = WeightFormat("int4", 1, 128)
    with fake_of("gfx950") as aiter, pytest.raises(OpUnavailableError) as error:
        aiter.ops.resolve_weights("quant_linear", BF16, form, in_features=256, out_features=96)
    assert "not int4 group 128 weight-only" in str(error.value)
