"""Normalisation, activation and rotary embedding: one pass each, float32 inside, rounded once."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import (
    Kernels,
    mismatch,
    num_threads,
    rows_apart,
)

_norm = Kernels("rms_norm", "5P5qdq")
_layer_norm = Kernels("layer_norm", "4P6qdq")
_silu = Kernels("silu_and_mul", "2P4q")
_gelu = Kernels("gelu_and_mul", "2P4q")
_situ = Kernels("situ_and_mul", "2P4q2d")
_mix = Kernels("mix_residuals", "5P3qdq")
_add = Kernels("add", "2P2q")
_scale = Kernels("scale", "1P1qdq")
_softcap = Kernels("softcap", "1P1qdq")
_mul_sigmoid = Kernels("mul_sigmoid", "2P4q")
_scale_by_position = Kernels("scale_by_position", "3P5q")
_rope = Kernels("rope", "6P12q")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., size] -> [..., size]."""
    shape = x.shape
    size = shape[-1]
    if x.dtype is not weight.dtype or weight.numel() != size:
        raise mismatch("rms_norm", x=x, weight=weight)
    x, layout = _norm_rows(x, size)
    out = x.new_empty(*shape)
    pointers = x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0
    _norm(x.dtype, *pointers, *layout, size, eps, num_threads())
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., size] or [T, heads, size] with a weight for each head -> the same shape.

    Args:
        bias: of the shape of the weight.
    """
    shape, size = x.shape, weight.shape[-1]
    if x.dtype is not weight.dtype or shape[-weight.dim() :] != weight.shape:
        raise mismatch("layer_norm", x=x, weight=weight)
    if bias is not None and (bias.shape != weight.shape or bias.dtype is not weight.dtype):
        raise mismatch("layer_norm", weight=weight, bias=bias)
    x, layout = _norm_rows(x, size)
    out = x.new_empty(*shape)
    bias_at = 0 if bias is None else bias.data_ptr()
    pointers = x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr()
    weight_rows = weight.numel() // size
    _layer_norm(x.dtype, *pointers, *layout, size, weight_rows, eps, num_threads())
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual); the sum is rounded before it is normalised."""
    shape = x.shape
    size = shape[-1]
    dtype = x.dtype
    if (
        residual.shape != shape
        or weight.numel() != size
        or dtype is not weight.dtype
        or dtype is not residual.dtype
    ):
        raise mismatch("add_rms_norm", x=x, residual=residual, weight=weight)
    x, layout = _norm_rows(x, size)
    if not residual.is_contiguous():
        residual = residual.contiguous()
    out, total = x.new_empty(*shape), x.new_empty(*shape)
    inputs = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    outputs = out.data_ptr(), total.data_ptr()
    _norm(dtype, *inputs, *outputs, *layout, size, eps, num_threads())
    return out, total


def _norm_rows(x: torch.Tensor, size: int) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """x and (outer, inner, outer_stride, inner_stride) of its rows."""
    if x.is_contiguous():
        return x, (x.numel() // size, 1, size, 0)
    strides = x.stride()
    if x.dim() == 3 and strides[2] == 1:  # heads of a fused projection
        return x, (x.shape[0], x.shape[1], strides[0], strides[1])
    if x.dim() == 2 and strides[1] == 1:  # a part of each row
        return x, (x.shape[0], 1, strides[0], 0)
    x = x.contiguous()
    return x, (x.numel() // size, 1, size, 0)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[T, 2 * size], gate beside up -> silu(gate) * up, [T, size]."""
    return _gate_and_mul(_silu, x)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """The same with gelu's approximation by tanh."""
    return _gate_and_mul(_gelu, x)


def situ_and_mul(x: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """The same with beta tanh(gate / beta) sigmoid(gate) and linear_beta tanh(up / linear_beta)."""
    return _gate_and_mul(_situ, x, beta, linear_beta)


def _gate_and_mul(kernels: Kernels, x: torch.Tensor, *factors: float) -> torch.Tensor:
    rows, width = x.shape
    size = width // 2
    stride = width
    if not x.is_contiguous():
        x, stride = rows_apart(x)
    out = x.new_empty(rows, size)
    kernels(x.dtype, x.data_ptr(), out.data_ptr(), rows, size, stride, num_threads(), *factors)
    return out


def mix_residuals(
    closed: torch.Tensor,
    running: torch.Tensor,
    norm: torch.Tensor,
    proj: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The mixture of closed [n, T, size], n at most 63, and running [T, size] by the softmax of
    their scores, [T, size]: a score is the product of a row's norm with proj.

    Args:
        norm: [size], its weight.
        proj: [1, size].

    Raises:
        ValueError: when shapes or data types do not fit.
    """
    rows, size = running.shape
    count, dtype = closed.shape[0], running.dtype
    fits = closed.shape == (count, rows, size) and norm.numel() == size == proj.numel()
    alike = closed.dtype is dtype and norm.dtype is dtype and proj.dtype is dtype
    dense = closed.is_contiguous() and running.is_contiguous()
    if not (fits and alike and dense):
        raise mismatch("mix_residuals", closed=closed, running=running, norm=norm, proj=proj)
    out = torch.empty_like(running)
    sources = closed.data_ptr(), running.data_ptr(), norm.data_ptr(), proj.data_ptr()
    if _mix(dtype, *sources, out.data_ptr(), count, rows, size, eps, num_threads()):
        raise mismatch("mix_residuals", closed=closed)
    return out


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y in the memory of x, which is returned."""
    same = x.shape == y.shape and x.dtype is y.dtype
    if not same or not x.is_contiguous() or not y.is_contiguous():
        raise mismatch("add", x=x, y=y)
    _add(x.dtype, x.data_ptr(), y.data_ptr(), x.numel(), num_threads())
    return x


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor in the memory of x, which is returned."""
    if not x.is_contiguous():
        raise mismatch("scale", x=x)
    _scale(x.dtype, x.data_ptr(), x.numel(), factor, num_threads())
    return x


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) in the memory of x, which is returned."""
    if not x.is_contiguous():
        raise mismatch("softcap", x=x)
    _softcap(x.dtype, x.data_ptr(), x.numel(), cap, num_threads())
    return x


def mul_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, size] * sigmoid(gate [T, 1 or size]) in the memory of x, which is returned."""
    rows, size = x.shape
    is_whole = x.is_contiguous() and gate.is_contiguous()
    if not is_whole or gate.shape not in ((rows, 1), (rows, size)) or gate.dtype is not x.dtype:
        raise mismatch("mul_sigmoid", x=x, gate=gate)
    gates = gate.shape[1]
    _mul_sigmoid(x.dtype, x.data_ptr(), gate.data_ptr(), rows, size, gates, num_threads())
    return x


def scale_by_position(
    x: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """x [T, heads, d] * factors[positions] in the memory of x, which is returned.

    Args:
        positions: [T] int64.
        factors: [P] float32, of each position.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a position without a factor.
    """
    rows, heads, size = x.shape
    if (
        positions.shape != (rows,)
        or positions.dtype is not torch.int64
        or factors.dtype is not torch.float32
        or not (positions.is_contiguous() and factors.is_contiguous())
        or x.stride()[1:] != (size, 1)
    ):
        raise mismatch("scale_by_position", x=x, positions=positions, factors=factors)
    pointers = x.data_ptr(), positions.data_ptr(), factors.data_ptr()
    sizes = rows, heads * size, x.stride(0), factors.numel()
    if wrong := _scale_by_position(x.dtype, *pointers, *sizes, num_threads()):
        raise IndexError(
            f"position {int(positions[wrong - 1])} has no factor; there are {factors.numel()}"
        )
    return x


def rope(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q [T, heads, d] and k [T, kv_heads, d] by positions [T] int64.

    Interleaved pairs (x0, x1), (x2, x3), ... are returned as halves.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a position outside the table.
    """
    rows, heads, head_dim = q.shape
    k_rows, kv_heads, k_dim = k.shape
    table_rows, rotary_dim = cos_sin.shape
    dtype = q.dtype
    if (
        k_rows != rows
        or k_dim != head_dim
        or rotary_dim > head_dim
        or dtype is not k.dtype
        or positions.numel() != rows
        or positions.dtype is not torch.int64
        or cos_sin.dtype is not torch.float32
        or not positions.is_contiguous()
        or not cos_sin.is_contiguous()
    ):
        raise mismatch("rope", positions=positions, q=q, k=k, cos_sin=cos_sin)
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    q_out = q.new_empty(rows, heads, head_dim)
    k_out = q.new_empty(rows, kv_heads, head_dim)
    inputs = positions.data_ptr(), cos_sin.data_ptr(), q.data_ptr(), k.data_ptr()
    sizes = rows, heads, kv_heads, head_dim, rotary_dim, table_rows
    strides = *q.stride()[:2], *k.stride()[:2]
    outputs = q_out.data_ptr(), k_out.data_ptr()
    wrong = _rope(dtype, *inputs, *outputs, *sizes, *strides, interleaved, num_threads())
    if wrong:
        raise IndexError(
            f"position {int(positions[wrong - 1])} lies outside the rotary table, which "
            f"has {table_rows}"
        )
    return q_out, k_out
