"""Copies, for programs, which have no torch operations."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads

_copy = Kernels("copy", "2P15q")
_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int64: 2,
    torch.int32: 3,
    torch.float16: 4,
}
_DIMENSIONS = 4


def can_copy(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `copy` takes these tensors."""
    known = to.dtype in _TYPES and source.dtype in _TYPES
    return known and to.dim() <= _DIMENSIONS and source.dim() <= to.dim()


def copy(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`to.copy_(source)`: broadcasts, converts types, any strides.

    Raises:
        ValueError: for types other than float32, bfloat16, float16, int64 and int32, more than four
            dimensions, or shapes that do not fit.
    """
    if not can_copy(to, source):
        raise mismatch("copy", to=to, source=source)
    source = source.expand(to.shape)
    if to.numel() == 0:
        return to
    fill = _DIMENSIONS - to.dim()
    _copy(
        None,
        *(source.data_ptr(), to.data_ptr()),
        *(_TYPES[source.dtype], _TYPES[to.dtype]),
        *((1,) * fill + tuple(to.shape)),
        *((0,) * fill + source.stride()),
        *((0,) * fill + to.stride()),
        num_threads(),
    )
    return to
