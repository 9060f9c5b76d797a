"""Quantisation of activations in plain torch: what the kernels must equal."""

from __future__ import annotations

import torch

from atom.model_ops.quant.weights import FP4_VALUES, Activations, scale_values

_LIMITS = {"int8": 127.0, "int16": 16383.0, "int12": 2039.0, "fp8": 448.0, "fp4": 6.0}
_E4M3_LIMIT = 448.0
_SMALLEST_SCALE = 1e-12


def quantise_activations(
    x: torch.Tensor, how: Activations, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., n] -> codes and scales; `x` is about their product.

    Args:
        input_scale: float32 []; see `Activations`.

    Returns:
        codes: the numbers of the codes, float32 [..., n].
        scale: float32 [..., ceil(n / group)], or [..., 1] without groups.
    """
    limit = _LIMITS[how.codes]
    x = x.float()
    size = x.shape[-1]
    group = how.group or size
    padded = torch.nn.functional.pad(x, (0, -size % group))
    grouped = padded.view(*padded.shape[:-1], -1, group)
    if how.is_static:
        assert input_scale is not None
        scale = input_scale.expand(*grouped.shape[:-1])
    else:
        scale = _scales(grouped.abs().amax(dim=-1), limit, how, input_scale)
    if how.codes in ("int12", "int16"):  # of so many that an inverse's rounding does not matter
        codes = (grouped * scale.reciprocal()[..., None]).round()
    else:
        codes = _round((grouped / scale[..., None]).clamp(-limit, limit), how.codes)
    return codes.flatten(-2)[..., :size], scale


def requantise(
    x: torch.Tensor, how: Activations, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., n] -> the numbers that its codes and scales stand for, float32."""
    codes, scale = quantise_activations(x, how, input_scale)
    size = x.shape[-1]
    group = how.group or size
    return codes * scale.repeat_interleave(group, dim=-1)[..., :size]


def _scales(
    amax: torch.Tensor, limit: float, how: Activations, input_scale: torch.Tensor | None
) -> torch.Tensor:
    if how.scale_type == "e8m0":
        return scale_values(e8m0_scales(amax, how.codes), "e8m0")
    if how.scale_type == "e4m3":
        assert input_scale is not None
        local = (amax / (limit * input_scale)).clamp(max=_E4M3_LIMIT).to(torch.float8_e4m3fn)
        return (local.float() * input_scale).clamp(min=_SMALLEST_SCALE)
    return _divided(amax, limit).clamp(min=_SMALLEST_SCALE)


def _divided(x: torch.Tensor, number: float) -> torch.Tensor:
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
        fraction, exponent = torch.frexp(_divided(amax, _LIMITS[codes]))
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


def _round(x: torch.Tensor, codes: str) -> torch.Tensor:
    if codes == "int8":
        return x.round()
    if codes == "fp8":
        return x.to(torch.float8_e4m3fn).float()
    positive = torch.tensor(FP4_VALUES, dtype=torch.float32, device=x.device)
    return torch.cat((positive, -positive))[round_to_fp4(x).long()]
