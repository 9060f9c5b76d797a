"""Quantised inputs in float64, by tables of the codes' numbers: what products are compared with."""

from __future__ import annotations

import torch
from quantised.writers import E2M1

FP4 = E2M1[:8]
# Codes 0..0x7E of e4m3fn: 4 bits of exponent, 3 of mantissa, bias 7.
E4M3 = torch.tensor(
    [
        (code & 7) / 8 * 2.0**-6 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        for code in range(0x7F)
    ],
    dtype=torch.float64,
)


def nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The number of a table of magnitudes; of two as near that with the even code."""
    distance = (x.abs()[..., None] - table).abs()
    code = distance.argmin(dim=-1)  # the lower of two
    is_tie = (distance == distance.amin(dim=-1, keepdim=True)).sum(dim=-1) == 2
    return table[code + (is_tie & (code % 2 == 1))].copysign(x)


def groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[T, in] -> float64 [T, groups, size]."""
    return x.double().unflatten(-1, (-1, size))


def int8_tokens(x: torch.Tensor) -> torch.Tensor:
    scale = x.double().abs().amax(dim=-1, keepdim=True) / 127
    return (x.double() / scale).round() * scale


def int8_static(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.double() / scale).round().clamp(-127, 127) * scale


def fp8_tokens(x: torch.Tensor) -> torch.Tensor:
    return fp8_groups(x, x.shape[-1])


def fp8_groups(x: torch.Tensor, size: int, powers: bool = False) -> torch.Tensor:
    parts = groups(x, size)
    scale = parts.abs().amax(dim=-1, keepdim=True) / 448
    if powers:
        scale = torch.exp2(scale.log2().ceil())
    return (nearest(parts / scale, E4M3) * scale).flatten(-2)


def fp8_static(x: torch.Tensor, scale: float) -> torch.Tensor:
    return nearest((x.double() / scale).clamp(-448, 448), E4M3) * scale


def mxfp4(x: torch.Tensor) -> torch.Tensor:
    parts = groups(x, 32)
    scale = torch.exp2(parts.abs().amax(dim=-1, keepdim=True).mul(8 / 7).log2().floor() - 2)
    return (nearest((parts / scale).clamp(-6, 6), FP4) * scale).flatten(-2)


def nvfp4(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale` is of the whole tensor, multiplied."""
    parts = groups(x, 16)
    local = nearest((parts.abs().amax(dim=-1, keepdim=True) / (6 * scale)).clamp(max=448), E4M3)
    return (nearest((parts / (local * scale)).clamp(-6, 6), FP4) * local * scale).flatten(-2)
