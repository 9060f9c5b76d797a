"""Activations are quantised bit for bit as the torch reference does."""

from __future__ import annotations

import pytest
import torch

from atom.model_ops.kernels.torch import quantise as reference
from atom.model_ops.kernels.triton.products.quantise import refuses_activations, round_rows
from atom.model_ops.quant.rounding import Form, InputRounding
from atom.model_ops.quant.weights import (
    FP4_VALUES,
    Activations,
    scale_values,
    unpack_nibbles,
)

HOW = (
    Activations("int8"),
    Activations("int8", 64),
    Activations("int8", is_static=True),
    Activations("fp8"),
    Activations("fp8", 128),
    Activations("fp8", 128, "e8m0"),
    Activations("fp8", is_static=True),
    Activations("fp4", 32, "e8m0"),
    Activations("fp4", 16, "e4m3"),
)


def quantise(
    x: torch.Tensor,
    how: Activations,
    one: torch.Tensor | None = None,
    fp8: torch.dtype = torch.float8_e4m3fn,
    form: Form = "codes",
    multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes or numbers, and scales."""
    out = round_rows(x, InputRounding(how, one, fp8, form, multiple))
    assert out.scale is not None
    assert (out.group, out.dtype) == (how.group, x.dtype)
    return out.numbers, out.scale


def inputs(dtype: torch.dtype, size: int = 304) -> torch.Tensor:
    """Rows of many magnitudes, one of zeros, and one of ties between codes."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, size, generator=generator)
    x *= torch.tensor([1.0, 1e-3, 1e4, 0.0, 1.0])[:, None]
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, -0.0])
    x[4] = ties[torch.arange(size) % 13]
    return x.to(dtype)


@pytest.mark.parametrize(
    ("how", "dtype"),
    [(how, torch.float32) for how in HOW] + [(how, torch.bfloat16) for how in HOW[3::2]],
    ids=str,
)
def test_equals_the_reference(how: Activations, dtype: torch.dtype, device: torch.device) -> None:
    x, one = inputs(dtype).to(device), torch.tensor(0.02, device=device)
    codes, scale = quantise(x, how, one, form="numbers")
    expected, scales = reference.quantise_activations(x, how, one)
    assert codes.dtype == dtype
    assert torch.equal(codes.float(), expected)
    assert torch.equal(scale.expand_as(scales), scales)
    products = round_rows(x, InputRounding(how, one, form="products"))
    assert (products.numbers.dtype, products.scale, products.group) == (dtype, None, 0)
    assert torch.equal(products.numbers, reference.requantise(x, how, one).to(dtype))


@pytest.mark.parametrize(
    ("how", "dtype"),
    [(Activations("int8"), torch.int8), (Activations("fp8", 128), torch.float8_e4m3fn)],
    ids=["int8", "fp8"],
)
def test_codes_are_stored_and_padded(
    how: Activations, dtype: torch.dtype, device: torch.device
) -> None:
    x = inputs(torch.float32, 300).to(device)
    codes, scale = quantise(x, how, multiple=128)
    expected, _ = reference.quantise_activations(x, how)
    assert (codes.dtype, codes.shape) == (dtype, (5, 384))
    assert torch.equal(codes[:, :300].float(), expected)
    assert not codes[:, 300:].float().any()
    assert scale.shape == (5, 3 if how.group else 1)


def test_codes_of_mxfp4_are_packed(device: torch.device) -> None:
    how = Activations("fp4", 32, "e8m0")
    x = inputs(torch.float32).to(device)
    codes, scale = quantise(x, how, multiple=128)
    expected, scales = reference.quantise_activations(x, how)
    values = torch.tensor(FP4_VALUES, device=device)
    numbers = torch.cat((values, -values))[unpack_nibbles(codes).long()]
    assert (codes.shape, scale.shape) == ((5, 192), (5, 12))
    assert torch.equal(numbers[:, :304], expected)
    assert torch.equal(scale_values(scale, "e8m0")[:, :10], scales)
    assert not numbers[:, 304:].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only")
def test_the_narrower_fp8_has_its_own_limit() -> None:
    """On gfx942 codes end at 240. Interpreted, as other GPUs have no such type."""
    x = inputs(torch.float32)[:3]
    fnuz = torch.float8_e4m3fnuz
    codes, scale = quantise(x, Activations("fp8"), None, fnuz)
    assert codes.dtype == fnuz
    assert torch.equal(scale, x.abs().amax(1, keepdim=True) / 240)
    assert torch.equal(codes.float(), (x / scale).clamp(-240, 240).to(fnuz).float())


def test_rows_may_lie_apart(device: torch.device) -> None:
    x = inputs(torch.float32).to(device)
    apart = torch.zeros(5, 900, device=device)[:, 3:-2:2][:, :304]
    apart.copy_(x)
    for ours, theirs in zip(
        quantise(apart, Activations("int8", 64)),
        quantise(x, Activations("int8", 64)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert quantise(x[:0], Activations("fp8"))[0].shape == (0, 304)


def test_what_is_refused() -> None:
    assert refuses_activations(Activations("fp8", 128), 7168) is None
    assert "48" in str(refuses_activations(Activations("fp8", 48), 7168))
    assert "70000" in str(refuses_activations(Activations("int8"), 70000))
    assert refuses_activations(Activations("int8", is_static=True), 70000) is None


def test_the_exponent_of_fp4_is_that_of_the_nearer_power(device: torch.device) -> None:
    """4, 6.99, 7, 7.01 and 8: from 7 on 8 / 4 is the scale, since 7 is nearer to 8 than to 6."""
    amax = torch.tensor([4.0, 6.99, 7.0, 7.01, 8.0], device=device)
    assert reference.e8m0_scales(amax, "fp4").tolist() == [127, 127, 128, 128, 128]
    x = amax[:, None].expand(-1, 32).contiguous()
    _, scale = quantise(x, Activations("fp4", 32, "e8m0"))
    assert scale.flatten().tolist() == [127, 127, 128, 128, 128]
