"""Dummy weights, to run a model without its checkpoint."""

from __future__ import annotations

import zlib

import torch
from torch import nn

_SPREAD = 0.02


@torch.no_grad()
def fill_with_dummy_weights(model: nn.Module) -> None:
    """Fill every parameter with small random numbers, seeded by its name.

    Vectors named `weight` (norms) are around one, so that activations keep their scale; all others
    are around zero. Codes of quantised weights are random bits, their scales small.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        if name.rpartition(".")[2].rpartition("_")[2] in ("d2t", "idx"):
            parameter.zero_()
            continue
        if "scale" in name:
            _fill_scale(parameter)
            continue
        if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
            _fill_codes(parameter, generator)
            continue
        parameter.uniform_(-_SPREAD, _SPREAD, generator=generator)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.add_(1)


def _fill_scale(scale: torch.Tensor) -> None:
    if scale.dtype is torch.uint8:  # e8m0: 2^-6
        scale.fill_(121)
    else:
        scale.fill_(_SPREAD)


def _fill_codes(codes: torch.Tensor, generator: torch.Generator) -> None:
    """Random bits; of an 8-bit float only numbers up to 2."""
    most = 0x40 if codes.dtype.is_floating_point else 0x80
    codes.view(torch.uint8).random_(0, most, generator=generator)
