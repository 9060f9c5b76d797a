"""FP8 conversion in plain torch."""

from __future__ import annotations

import torch


def quantise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x / scale` in FP8: saturated to the finite range, rounded to nearest even.

    scale: [1] float32. NaN stays NaN.
    """
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-limit, limit).to(dtype)


def dequantise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x * scale` as `dtype`, computed in float32."""
    return x.float().mul_(scale).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, since few torch operations support FP8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
