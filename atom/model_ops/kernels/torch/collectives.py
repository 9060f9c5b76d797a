"""Sums over the ranks by the group's own collectives: NCCL, RCCL or gloo."""

from __future__ import annotations

import torch

from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.kernels.torch.elementwise import AddNorm


def all_reduce(partial: torch.Tensor, group: ParallelGroup) -> torch.Tensor:
    """The sum of all ranks' `partial`, which may be overwritten."""
    return group.all_reduce(partial)


def all_reduce_add_rms_norm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: ParallelGroup,
    add_rms_norm: AddNorm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(norm(x + residual), x + residual)`, where x is the sum of all ranks' `partial`, which may
    be overwritten.

    Args:
        add_rms_norm: what follows the sum, where both are not one kernel.
    """
    return add_rms_norm(group.all_reduce(partial), residual, weight, eps)
