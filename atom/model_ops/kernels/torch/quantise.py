"""Quantisation of activations in plain torch: what the kernels must equal."""

from __future__ import annotations

import torch

from atom.model_ops.quant.codes import LARGEST_CODES, divided, e8m0_scales, round_to_fp4
from atom.model_ops.quant.weights import FP4_VALUES, Activations, scale_values

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
    limit = LARGEST_CODES[how.codes]
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
    return divided(amax, limit).clamp(min=_SMALLEST_SCALE)


def _round(x: torch.Tensor, codes: str) -> torch.Tensor:
    if codes == "int8":
        return x.round()
    if codes == "fp8":
        return x.to(torch.float8_e4m3fn).float()
    positive = torch.tensor(FP4_VALUES, dtype=torch.float32, device=x.device)
    return torch.cat((positive, -positive))[round_to_fp4(x).long()]
