"""Quantised weights in the forms that aiter's kernels read."""

from __future__ import annotations

from dataclasses import replace

import torch

from atom.model_ops.kernels.aiter.support import arch
from atom.model_ops.kernels.probe import EntryPoint, function
from atom.model_ops.kernels.torch.fp8 import bits
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat, scale_values

# Inputs quantised by token and by groups.
_TOKEN, _GROUPS = Activations("fp8"), Activations("fp8", 128)
_POWERS = Activations("fp8", 128, "e8m0")

# Blocks of 128 x 128, with inputs in groups of 128, and those whose scales are powers of two.
FP8_BLOCK = WeightFormat("fp8", 128, 128, activations=_GROUPS)
FP8_BLOCKS = (FP8_BLOCK, WeightFormat("fp8", 128, 128, "e8m0", activations=_GROUPS))
FP8_POWER_BLOCKS = tuple(replace(block, activations=_POWERS) for block in FP8_BLOCKS)
# A scale per output, and per token or for all.
FP8_CHANNEL = WeightFormat("fp8", has_row_scale=True, activations=_TOKEN)
FP8_STATIC = replace(FP8_CHANNEL, activations=Activations("fp8", is_static=True))
INT8_CHANNEL = WeightFormat("int8", has_row_scale=True, activations=Activations("int8"))
# Groups of 32, whose scales are powers of two. aiter rounds those of inputs up, to the smallest one
# that is at least amax / 6; `Activations` does so from 7/4 of a power of two on, 6/4 here.
MXFP4 = WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0"))
# Groups of 32 around 0, with inputs as they are.
INT4 = WeightFormat("int4", 1, 32)

E8M0_SHUFFLE = EntryPoint("aiter.utility.fp4_utils:e8m0_shuffle", "scale")
# Rows and columns of e8m0 scales are padded to multiples of these.
E8M0_ROWS, E8M0_COLUMNS = 256, 8

_NEGATIVE_ZERO = 0x80


def fp8_weights(weights: QuantWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in the device's FP8 type, in place, and their float32 scales.

    The scales are those of blocks if the format has them, else [..., out, 1]. gfx942 multiplies
    e4m3fnuz, where the same bits mean half as much, and those of -0 are NaN.
    """
    if weights.scale is not None:
        scale = scale_values(weights.scale, weights.format.scale_type)
    else:
        assert weights.row_scale is not None
        scale = weights.row_scale.float()[..., None]
    if not is_fnuz():
        return weights.codes, scale.contiguous()
    stored = bits(weights.codes)
    for matrix in stored if stored.dim() == 3 else (stored,):
        matrix.masked_fill_(matrix == _NEGATIVE_ZERO, 0)
    return stored.view(torch.float8_e4m3fnuz), (scale * 2).contiguous()


def is_fnuz() -> bool:
    """Whether the device multiplies e4m3fnuz."""
    return arch() == "gfx942"


def e8m0_scales(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [..., out, groups] -> e8m0 [rows, columns], shuffled and padded."""
    flat = scale.reshape(-1, scale.shape[-1]).contiguous()
    out: torch.Tensor = function(E8M0_SHUFFLE)(flat)
    return out.view(torch.float8_e8m0fnu)


def refuses_format(
    query_format: WeightFormat | None, known: tuple[WeightFormat, ...]
) -> str | None:
    """Why weights of this format cannot be multiplied; None if they can."""
    if query_format in known:
        return None
    return f"multiplies {', '.join(map(str, known))}, not {query_format}"


def refuses_multiples(**sizes: tuple[int, int]) -> str | None:
    """Why these sizes do not fit; None if each is a multiple of its number.

    Args:
        sizes: size and number by name.
    """
    for name, (size, number) in sizes.items():
        if size % number:
            return f"{name}={size} is no multiple of {number}"
    return None


def refuses_arch(arch: str) -> str | None:
    """Why this architecture has no MXFP4 products; None if it has."""
    return None if arch == "gfx950" else f"{arch} does not multiply MXFP4, gfx950 does"
