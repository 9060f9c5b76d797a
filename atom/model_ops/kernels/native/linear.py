"""Matrix products that read the weights once for all rows."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads, rows_apart

_linear = Kernels("linear", "4P5q")
_logits = Kernels("logits", "4P5q")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K], weight [N, K], bias [N] -> x @ weight.T + bias, [M, N].

    Accumulates in float32 and rounds once. A row's result has the same bits for every M.

    Raises:
        ValueError: when shapes or data types differ.
    """
    return _multiply(_linear, x, weight, bias, x.dtype)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [R, K], weight [V, K] -> x @ weight.T, [R, V] float32: the sums as they are.

    A row's result has the same bits for every R.

    Raises:
        ValueError: when shapes or data types differ.
    """
    return _multiply(_logits, x, weight, None, torch.float32)


def _multiply(
    kernels: Kernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
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
    out = x.new_empty(rows, outs, dtype=out_dtype)
    pointers = x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr()
    kernels(dtype, *pointers, rows, size, outs, stride, num_threads())
    return out
