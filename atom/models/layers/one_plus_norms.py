"""Norms that multiply by 1 + weight."""

from __future__ import annotations

from torch import nn

from atom.model_ops.layernorm import RMSNorm


class OnePlusNorms(nn.Module):
    """A model whose checkpoint stores the weights of its RMS norms less one."""

    @property
    def dequantised_bytes(self) -> int:
        return 0

    def process_after_loading(self) -> None:
        """Add the one."""
        add_one_to_norms(self)


def add_one_to_norms(model: nn.Module) -> None:
    """Add one to the weights of all RMS norms."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.data += 1
