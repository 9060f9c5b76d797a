"""When the elementwise kernels can run; imports Triton only when one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atom.model_ops.registry import OpQuery

if TYPE_CHECKING:
    import torch

# A program holds a whole row in its registers.
_LARGEST_ROW = 16384


def refuses_norm(query: OpQuery) -> str | None:
    """Why rows of this size cannot be normalised; None when they can."""
    size = query.shape["size"]
    return f"size={size} is larger than {_LARGEST_ROW}" if size > _LARGEST_ROW else None


def load_rms_norm() -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    from atom.model_ops.kernels.triton.rms_norm import rms_norm

    return rms_norm


def load_add_rms_norm() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from atom.model_ops.kernels.triton.rms_norm import add_rms_norm

    return add_rms_norm


def load_silu_and_mul() -> Callable[[torch.Tensor], torch.Tensor]:
    from atom.model_ops.kernels.triton.activation import silu_and_mul

    return silu_and_mul


def load_rope() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from atom.model_ops.kernels.triton.rope import rope

    return rope
