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
    are around zero.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            parameter.zero_()
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        parameter.uniform_(-_SPREAD, _SPREAD, generator=generator)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.add_(1)
