"""Products with packed quantised weights, and with those that are dequantised when loaded."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import (
    Kernels,
    check_out,
    mismatch,
    num_threads,
    rows_apart,
)
from atom.model_ops.kernels.native.linear import linear, logits
from atom.model_ops.kernels.native.quant.pack import PackedWeights
from atom.model_ops.kernels.torch.quant import DenseWeights
from atom.model_ops.kernels.torch.quant import quant_embedding as dense_embedding

__all__ = [
    "dense_embedding",
    "dense_linear",
    "dense_logits",
    "quant_linear",
    "quant_linear_into",
    "quant_logits",
]

_linear = Kernels("quant_linear", "9P16qdq")
_logits = Kernels("quant_logits", "9P16qdq")


def quant_linear(
    x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [M, in] -> [M, out].

    Codes are multiplied with codes where the format quantises inputs; bfloat16 on matrix tiles with
    the weights as bfloat16, which has the bits of `linear`; other numbers in float32, with float32
    sums of groups. A row's result has the same bits for every M.

    Raises:
        ValueError: when shapes or data types differ.
    """
    out = x.new_empty(x.shape[0], weights.out_features)
    _multiply(_linear, x, weights, bias, out)
    return out


def quant_linear_into(
    x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write what `quant_linear` returns to `out` [M, out], whose rows may lie apart.

    Raises:
        ValueError: when shapes or data types differ.
    """
    check_out("quant_linear", out, x.shape[0], weights.out_features, x.dtype)
    _multiply(_linear, x, weights, bias, out)


def quant_logits(x: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
    """x [R, in] -> [R, out] float32: the sums of `quant_linear` as they are.

    Raises:
        ValueError: when shapes differ.
    """
    out = x.new_empty(x.shape[0], weights.out_features, dtype=torch.float32)
    _multiply(_logits, x, weights, None, out)
    return out


def dense_linear(x: torch.Tensor, weights: DenseWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, in] -> [M, out], of dequantised weights."""
    return linear(weights.round_inputs(x), weights.weight, bias)


def dense_logits(x: torch.Tensor, weights: DenseWeights) -> torch.Tensor:
    """x [R, in] -> [R, out] float32, of dequantised weights."""
    return logits(weights.round_inputs(x), weights.weight)


def _multiply(
    kernels: Kernels,
    x: torch.Tensor,
    weights: PackedWeights,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows, size = x.shape
    outs = weights.out_features
    if size != weights.in_features or (weights.takes_bfloat16 and x.dtype is not torch.bfloat16):
        raise mismatch(kernels.op, x=x, codes=weights.codes)
    if bias is not None and (bias.numel() != outs or bias.dtype is not x.dtype):
        raise mismatch(kernels.op, x=x, bias=bias)
    x, stride = rows_apart(x)
    kernels(
        x.dtype,
        x.data_ptr(),
        *weights.addresses(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        stride,
        out.stride(0),
        *weights.sizes,
        weights.fixed_scale,
        num_threads(),
    )
