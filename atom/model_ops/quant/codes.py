"""Codes of small types and their exponents, in plain torch: what the kernels must equal."""

from __future__ import annotations

import torch

from atom.model_ops.quant.weights import FP4_VALUES

LARGEST_CODES = {"int8": 127.0, "int16": 16383.0, "int12": 1904.0, "fp8": 448.0, "fp4": 6.0}


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number, rounded once; on a GPU torch multiplies by the inverse of a number that is in no
    tensor of the device.
    """
    return x / x.new_full((), number)


def e8m0_scales(amax: torch.Tensor, codes: str) -> torch.Tensor:
    """The largest magnitude of each group -> uint8 exponents, biased by 127."""
    if codes == "fp4":
        # The exponent of amax less that of the largest code, 4. Amax is rounded up to the next
        # power of two where that is nearer to what its codes can be (from 7 / 4 on).
        fraction, exponent = torch.frexp(amax)
        exponent = torch.where(fraction >= 7 / 8, exponent, exponent - 1) - 2
    else:
        fraction, exponent = torch.frexp(divided(amax, LARGEST_CODES[codes]))
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    return torch.where(amax > 0, exponent + 127, 0).clamp(0, 254).to(torch.uint8)


def round_to_fp4(x: torch.Tensor) -> torch.Tensor:
    """x -> the code of the nearest e2m1 number, uint8; ties to the even code, saturated."""
    values = torch.tensor(FP4_VALUES, dtype=torch.float32, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    magnitude = x.float().abs()
    below = torch.bucketize(magnitude, middles)  # middle m[j] goes to j, the lower code
    is_tie = (magnitude[..., None] == middles).any(-1) & (below % 2 == 1)
    code = torch.where(is_tie, below + 1, below)
    return (code | torch.where(torch.signbit(x), 8, 0)).to(torch.uint8)
