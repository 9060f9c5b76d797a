"""Matrix products that read the weights once for all rows."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import (
    Kernels,
    check_out,
    mismatch,
    num_threads,
    rows_apart,
)

_linear = Kernels("linear", "4P6q")
_logits = Kernels("logits", "4P6q")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K], weight [N, K], bias [N] -> x @ weight.T + bias, [M, N].

    Accumulates in float32 and rounds once. A row's result has the same bits for every M.

    Raises:
        ValueError: when shapes or data types differ.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    _multiply(_linear, x, weight, bias, out)
    return out


def linear_into(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write what `linear` returns to `out` [M, N], whose rows may lie apart.

    Raises:
        ValueError: when shapes or data types differ.
    """
    check_out("linear", out, x.shape[0], weight.shape[0], x.dtype)
    _multiply(_linear, x, weight, bias, out)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [R, K], weight [V, K] -> x @ weight.T, [R, V] float32: the sums as they are.

    A row's result has the same bits for every R.

    Raises:
        ValueError: when shapes or data types differ.
    """
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    _multiply(_logits, x, weight, None, out)
    return out


def _multiply(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows, size = x.shape
    outs, weight_size = weight.shape
    dtype = x.dtype
    if size != weight_size or dtype is not weight.dtype or not weight.is_contiguous():
        raise mismatch(kernels.op, x=x, weight=weight)
    bias_at = 0
    if bias is not None:
        if bias.numel() != outs or bias.dtype is not dtype:
            raise mismatch(kernels.op, weight=weight, bias=bias)
        bias_at = bias.data_ptr()
    stride = size
    if not x.is_contiguous():
        x, stride = rows_apart(x)
    pointers = x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr()
    kernels(dtype, *pointers, rows, size, outs, stride, out.stride(0), num_threads())
