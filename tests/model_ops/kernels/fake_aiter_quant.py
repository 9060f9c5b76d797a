"""What the fake aiter's quantised products check and compute."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from fake_aiter_layouts import shuffled_scale, unshuffled_scale, unshuffled_weight

if TYPE_CHECKING:
    from fake_aiter import Check

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
FP4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


class QuantType(Enum):
    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class ActivationType(Enum):
    Silu = 0


def fp8_of(arch: str) -> torch.dtype:
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


def quantise(
    x: torch.Tensor, dtype: torch.dtype, group: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> codes, and float32 scales [T, K / group]."""
    groups = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    limit = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = groups.abs().amax(-1).clamp(min=1e-10) / limit
    codes = groups / scale[..., None]
    codes = codes.round() if dtype == torch.int8 else codes.clamp(-limit, limit)
    return codes.to(dtype).flatten(-2), scale


def quantise_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> codes, two to an element, and e8m0 scales [T, K / 32], rounded up."""
    groups = x.float().unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1).clamp(min=1e-10) / 6).log2().ceil()
    numbers = groups / exponent.exp2()[..., None]
    codes = (numbers.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (numbers < 0)
    codes = codes.flatten(-2).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(FP4), (exponent + 127).to(torch.uint8)


def numbers_of_fp4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes [..., K / 2] row-major, and uint8 scales [..., K / 32] -> [..., K]."""
    stored = codes.view(torch.uint8)
    both = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).long()
    numbers = torch.cat((E2M1, -E2M1))[both]
    return numbers * (scale.float() - 127).exp2().repeat_interleave(32, dim=-1)


def per_token_quant_hip(check: Check) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = check.value("quant_dtype")
    check.that(dtype in (torch.int8, fp8_of(check.library.arch)), "a type of the device")
    return quantise(check.activation("x", "T K"), dtype)


def per_group_quant_hip(check: Check) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, group = check.value("quant_dtype"), check.value("group_size")
    x, kind = check.activation("x", "T K"), check.value("scale_type")
    check.that(dtype == fp8_of(check.library.arch), "the device's FP8")
    check.that(group in (32, 64, 128) and x.shape[1] % group == 0, "whole groups")
    if kind == "dtypes.fp32":
        return quantise(x, dtype, group)
    check.that(kind == E8M0, "two types of scales")
    limit = torch.finfo(dtype).max
    groups = x.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1).clamp(min=1e-10) / limit).log2().ceil().exp2()
    codes = (groups / scale[..., None]).clamp(-limit, limit).to(dtype)
    return codes.flatten(-2), scale.to(E8M0)


def static_per_tensor_quant(check: Check) -> None:
    """Does not saturate."""
    fp8 = fp8_of(check.library.arch)
    x, out = check.activation("input", "T K"), check.tensor("out", "T K", fp8)
    scaled = x.float() / check.scale("scale")
    out.copy_(scaled.masked_fill(scaled.abs() > torch.finfo(fp8).max, torch.nan))


def per_1x32_f4_quant_hip(check: Check) -> tuple[torch.Tensor, torch.Tensor]:
    x = check.activation("x", "T K")
    check.that(x.shape[1] % 32 == 0, "whole groups")
    codes, scale = quantise_fp4(x)
    return codes, (shuffled_scale(scale) if check.value("shuffle") else scale).view(E8M0)


def e8m0_shuffle(check: Check) -> torch.Tensor:
    return shuffled_scale(check.tensor("scale", "R C", torch.uint8, E8M0))


def _product(check: Check, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    dtype = check.value("dtype")
    check.that(dtype in check.activations, "a result in a type of activations")
    return F.linear(x, weight).to(dtype)


def _scaled(check: Check, codes: torch.Tensor, scale: str, shape: str) -> torch.Tensor:
    return codes.float() * check.tensor(scale, shape, torch.float32)


def gemm_a8w8(check: Check) -> torch.Tensor:
    kinds = torch.int8, fp8_of(check.library.arch)
    x, weight = check.tensor("XQ", "M K", *kinds), check.tensor("WQ", "N K", *kinds)
    check.that(x.dtype == weight.dtype, "one type")
    inputs = _scaled(check, x, "x_scale", "M 1")
    return _product(check, inputs, _scaled(check, weight, "w_scale", "N 1"))


def gemm_a8w8_bpreshuffle(check: Check) -> torch.Tensor:
    fp8 = fp8_of(check.library.arch)
    x, weight = check.tensor("XQ", "M K", fp8), check.tensor("WQ", "N K", fp8)
    size = check.sizes["K"]
    check.that(size >= 192 and size % 64 == 0, "inputs that it has kernels for")
    weight = _scaled(check, unshuffled_weight(weight), "w_scale", "N 1")
    return _product(check, _scaled(check, x, "x_scale", "M 1"), weight)


def gemm_a8w8_blockscale(check: Check) -> torch.Tensor:
    fp8 = fp8_of(check.library.arch)
    x, weight = check.tensor("XQ", "M K", fp8), check.tensor("WQ", "N K", fp8)
    scales = [
        check.tensor(n, s, torch.float32) for n, s in (("x_scale", "M G"), ("w_scale", "B G"))
    ]
    sizes = check.sizes
    check.that(sizes["K"] == 128 * sizes["G"], "whole groups of inputs")
    check.that(sizes["B"] == -(-sizes["N"] // 128), "a scale per block")
    inputs = x.float() * scales[0].repeat_interleave(128, dim=1)
    blocks = scales[1].repeat_interleave(128, dim=1).repeat_interleave(128, dim=0)
    return _product(check, inputs, weight.float() * blocks[: sizes["N"]])


def gemm_a4w4(check: Check) -> torch.Tensor:
    check.that(check.library.arch == "gfx950", "MXFP4 is gfx950's")
    codes, weight = check.tensor("A", "M H", FP4), check.tensor("B", "N H", FP4)
    groups = check.sizes["H"] // 16
    check.that(groups % 8 == 0, "whole tiles of scales")
    padded = [-(-check.sizes[n] // 256) * 256 for n in "MN"]
    scales = [
        unshuffled_scale(check.tensor(n, f"{rows} {groups}", E8M0).view(torch.uint8))
        for n, rows in zip(("A_scale", "B_scale"), padded, strict=True)
    ]
    inputs = numbers_of_fp4(codes, scales[0][: len(codes)])
    weight = unshuffled_weight(weight.view(torch.uint8))
    return _product(check, inputs, numbers_of_fp4(weight, scales[1][: len(weight)]))


KERNELS: dict[str, Callable[[Any], Any]] = {
    kernel.__name__: kernel
    for kernel in (
        per_token_quant_hip,
        per_group_quant_hip,
        static_per_tensor_quant,
        per_1x32_f4_quant_hip,
        e8m0_shuffle,
        gemm_a8w8,
        gemm_a8w8_bpreshuffle,
        gemm_a8w8_blockscale,
        gemm_a4w4,
    )
}
