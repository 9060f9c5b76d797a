"""The mended interpreter computes what torch computes, in every type that kernels use."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from atom.model_ops.quant.weights import QuantWeights, WeightFormat, dequantise

FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2}


@triton.jit
def _cast_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def _dot_kernel(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    rm, rk, rn = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + rm[:, None] * K + rk[None, :])
    right = tl.load(b + rn[:, None] * K + rk[None, :])
    product = tl.dot(left, tl.trans(right).to(left.dtype))
    tl.store(out + rm[:, None] * N + rn[None, :], product)


@triton.jit
def _arithmetic_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.where(x < y, x * y + x, tl.maximum(x, y) - y))


@triton.jit
def _sum_kernel(source, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(source + tl.arange(0, N)), 0))


@triton.jit
def _dot_scaled_kernel(a, a_scale, b, b_scale, out, FORMAT: tl.constexpr):
    rows, bytes_, groups = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, 4)
    left, right = (
        tl.load(a + rows[:, None] * 64 + bytes_[None, :]),
        tl.load(b + rows[:, None] * 64 + bytes_[None, :]),
    )
    left_scale, right_scale = (
        tl.load(a_scale + rows[:, None] * 4 + groups[None, :]),
        tl.load(b_scale + rows[:, None] * 4 + groups[None, :]),
    )
    product = tl.dot_scaled(left, left_scale, FORMAT, tl.trans(right), right_scale, FORMAT)
    tl.store(out + rows[:, None] * 16 + rows[None, :], product)


def cast(values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype, device=device)
    _cast_kernel[(1,)](values.to(device), out, values.numel())
    return out.cpu()


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({1: torch.uint8, 2: torch.int16}[values.element_size()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_multiplies_values(dtype: torch.dtype, device: torch.device) -> None:
    a, b = (torch.randn(size, 32).to(dtype) for size in (16, 64))
    out = torch.empty(16, 64, device=device)
    _dot_kernel[(1,)](a.to(device), b.to(device), out, 16, 32, 64)
    torch.testing.assert_close(out.cpu().double(), a.double() @ b.double().T, atol=1e-4, rtol=1e-4)


def test_dot_of_mxfp4_codes_and_scales(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("how the interpreter does it")
    a, b = (torch.randint(0, 256, (16, 64), dtype=torch.uint8) for _ in range(2))
    scales = [torch.randint(120, 130, (16, 4), dtype=torch.uint8) for _ in range(2)]
    out = torch.empty(16, 16)
    _dot_scaled_kernel[(1,)](a, scales[0], b, scales[1], out, tl.constexpr("e2m1"))
    left, right = (
        dequantise(QuantWeights(WeightFormat("fp4", 1, 32, "e8m0"), codes, scale))
        for codes, scale in zip((a, b), scales, strict=True)
    )
    torch.testing.assert_close(out, left @ right.T)


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
def test_dot_of_a_widened_fp8_operand(name: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("which fp8 types a GPU converts depends on its arch")
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).to(FP8[name])
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, out, 16, 32, 16)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, atol=1e-4, rtol=1e-4)


def test_bfloat16_is_rounded_to_nearest_even(device: torch.device) -> None:
    # 1 + 2^-8 lies half way between two numbers; 1 + 3 * 2^-8 too, with the other one even.
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1.9999, 3.3e38, 0.0, 1e-40, -0.0])
    values = torch.cat([ties, torch.randn(248) * 100])
    assert torch.equal(bits(cast(values, torch.bfloat16, device)), bits(values.bfloat16()))


@pytest.mark.parametrize("name", FP8)
def test_fp8_carries_out_of_the_mantissa(name: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("which fp8 types a GPU converts depends on its arch")
    values = torch.cat([torch.tensor([1.97, -1.97, 15.9, 0.0, 2**-9, 2**-10, 1.0625, 1.1875])])
    values = torch.cat([values, torch.randn(120) * 50])
    assert cast(values, FP8[name], device)[0].item() == 2.0
    assert torch.equal(bits(cast(values, FP8[name], device)), bits(values.to(FP8[name])))


@pytest.mark.parametrize("name", FP8)
def test_every_fp8_value_is_read(name: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("which fp8 types a GPU converts depends on its arch")
    every = torch.arange(256, dtype=torch.uint8).view(FP8[name])
    for wide in (torch.float32, torch.bfloat16, torch.float16):
        torch.testing.assert_close(cast(every, wide, device), every.to(wide), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_integers_become_values(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.tensor([0, 1, -7, 300])
    assert torch.equal(cast(values, dtype, device), values.to(dtype))
    assert torch.equal(cast(values.to(dtype), torch.int64, device), values.to(dtype).long())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_on_narrow_values(dtype: torch.dtype, device: torch.device) -> None:
    x, y = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    out = torch.empty(64, dtype=dtype, device=device)
    _arithmetic_kernel[(1,)](x.to(device), y.to(device), out, 64)
    expected = torch.where(x < y, x * y + x, torch.maximum(x, y) - y)
    # A GPU may fuse the product and the sum.
    torch.testing.assert_close(out.cpu(), expected, atol=2e-2, rtol=2e-2)


def test_a_sum_over_raw_bits_is_refused(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("a GPU does sum bfloat16")
    with pytest.raises(Exception, match="convert to float32 first"):
        _sum_kernel[(1,)](torch.ones(8, dtype=torch.bfloat16), torch.zeros(1), 8)


def test_a_pool_is_not_copied(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("about the interpreter")
    pool = torch.empty((1 << 31) + 8, dtype=torch.bfloat16)  # 4 GiB that nobody touches
    pool[-8:] = torch.arange(8)
    out = torch.empty(8)
    _cast_kernel[(1,)](pool[-8:], out, 8)
    assert out.tolist() == list(range(8))
