"""Copies and rows by index, for programs, which have no torch operations."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads

_copy = Kernels("copy", "2P15q")
_gather = Kernels("gather_rows", "3P5q")
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


def gather_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`source[index]`, for rows [N, ...] that are contiguous and index [R] int64.

    Raises:
        ValueError: when shapes or types do not fit.
        IndexError: for an index that is no row.
    """
    if (
        index.dtype is not torch.int64
        or index.dim() != 1
        or not index.is_contiguous()
        or not source[:1].is_contiguous()
    ):
        raise mismatch("gather_rows", source=source, index=index)
    out = source.new_empty(index.shape[0], *source.shape[1:])
    item = source.element_size()
    row_bytes = source[:1].numel() * item
    wrong = _gather(
        None,
        *(index.data_ptr(), source.data_ptr(), out.data_ptr()),
        *(index.shape[0], source.shape[0], row_bytes, source.stride(0) * item, num_threads()),
    )
    if wrong:
        raise IndexError(f"{int(index[wrong - 1])} is none of {source.shape[0]} rows")
    return out
