"""RMS norm, with a residual or of two parts of a row: float32 inside, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.torch.elementwise import Norm
from atom.model_ops.kernels.triton.support import refuses_parts
from atom.model_ops.registry import OpQuery

# A program keeps a whole row in registers.
LARGEST_ROW = 16384


def refuses(query: OpQuery) -> str | None:
    """Why this row size is not supported; None if it is."""
    size = query.shape["size"]
    return f"size={size} is larger than {LARGEST_ROW}" if size > LARGEST_ROW else None


def refuses_pair(query: OpQuery) -> str | None:
    """Why one kernel cannot compute both norms; None if it can."""
    return refuses_parts("rms_norm") or refuses(query)


@triton.jit
def normed_row(x, weight_ptr, columns, mask, eps, SIZE: tl.constexpr):
    """The norm of a row x [BLOCK] float32, which is 0 from SIZE on."""
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return x * inverse * weight


@triton.jit
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    inner,
    outer_stride,
    inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Grid: rows. Row r of x is at (r // inner, r % inner); outputs are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    start = row // inner * outer_stride + row % inner * inner_stride
    x = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        start = row // inner * residual_outer_stride + row % inner * residual_inner_stride
        x += tl.load(residual_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        # Normalise the rounded sum, which is what later layers see.
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + columns, total, mask=mask)
        x = total.to(tl.float32)
    normed = normed_row(x, weight_ptr, columns, mask, eps, SIZE)
    tl.store(out_ptr + row * SIZE + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_part(x_ptr, weight_ptr, out_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = normed_row(x, weight_ptr, columns, mask, eps, SIZE)
    tl.store(out_ptr + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_pair(
    x_ptr,
    weight_ptr,
    other_weight_ptr,
    out_ptr,
    other_out_ptr,
    row_stride,
    eps,
    SIZE: tl.constexpr,
    OTHER_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
):
    """Grid: rows, their two parts."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    if tl.program_id(1) == 0:
        norm_part(x_ptr, weight_ptr, out_ptr + row * SIZE, eps, SIZE, BLOCK)
    else:
        other_out_ptr += row * OTHER_SIZE
        norm_part(x_ptr + SIZE, other_weight_ptr, other_out_ptr, eps, OTHER_SIZE, OTHER_BLOCK)


@triton.jit
def _norm_beside(
    x_ptr,
    y_ptr,
    weight_ptr,
    other_weight_ptr,
    out_ptr,
    other_out_ptr,
    row_stride,
    other_row_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows, the two inputs."""
    row = tl.program_id(0).to(tl.int64)
    out_ptr += row * 2 * SIZE
    if tl.program_id(1) == 0:
        norm_part(x_ptr + row * row_stride, weight_ptr, out_ptr, eps, SIZE, BLOCK)
    else:
        columns = tl.arange(0, BLOCK)
        mask = columns < SIZE
        y = tl.load(y_ptr + row * other_row_stride + columns, mask=mask, other=0.0)
        normed = normed_row(y.to(tl.float32), other_weight_ptr, columns, mask, eps, SIZE)
        normed = normed.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + SIZE + columns, normed, mask=mask)
        tl.store(other_out_ptr + row * SIZE + columns, normed, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size], weight [size] -> [..., size]; inputs of up to three dimensions are not copied.

    Raises:
        ValueError: when shapes do not fit.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), all [..., size]; the sum is rounded before its norm.

    Raises:
        ValueError: when shapes do not fit.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def rms_norm_beside(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    other_weight: torch.Tensor,
    eps: float,
    rms_norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in `kernels/torch/elementwise.py`; `rms_norm` is not called.

    Raises:
        ValueError: when shapes do not fit.
    """
    del rms_norm
    rows, size = x.shape
    if not x.shape == y.shape == (rows, len(weight)) == (rows, len(other_weight)):
        raise ValueError(
            f"norms side by side want rows as wide as their weights; given {list(x.shape)} and "
            f"{list(y.shape)} with weights {list(weight.shape)} and {list(other_weight.shape)}"
        )
    out, other = x.new_empty(rows, 2 * size), x.new_empty(rows, size)
    if rows == 0:
        return out, other
    x, y = (t if t.stride(1) == 1 else t.contiguous() for t in (x, y))
    block = triton.next_power_of_2(size)
    strides = x.stride(0), y.stride(0)
    _norm_beside[(rows, 2)](
        *(x, y, weight, other_weight, out, other, *strides, eps),
        SIZE=size,
        BLOCK=block,
        num_warps=num_warps(block),
    )
    return out, other


def rms_norm_pair(
    x: torch.Tensor, weight: torch.Tensor, other_weight: torch.Tensor, eps: float, rms_norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of the first a and the next b columns of x [T, a + b or more]: [T, a], [T, b].

    Args:
        weight, other_weight: [a], [b].
        rms_norm: not called.

    Raises:
        ValueError: when shapes do not fit.
    """
    del rms_norm
    (rows, width), size, other_size = x.shape, len(weight), len(other_weight)
    if size + other_size > width:
        raise ValueError(f"rows of {width} have no parts of {size} and {other_size}")
    out, other_out = x.new_empty(rows, size), x.new_empty(rows, other_size)
    if rows == 0:
        return out, other_out
    x = x if x.stride(1) == 1 else x.contiguous()
    block, other_block = triton.next_power_of_2(size), triton.next_power_of_2(other_size)
    _norm_pair[(rows, 2)](
        x,
        weight.contiguous(),
        other_weight.contiguous(),
        out,
        other_out,
        x.stride(0),
        eps,
        SIZE=size,
        OTHER_SIZE=other_size,
        BLOCK=block,
        OTHER_BLOCK=other_block,
        num_warps=num_warps(max(block, other_block)),
    )
    return out, other_out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    if weight.shape != (size,) or (residual is not None and residual.shape != x.shape):
        given = None if residual is None else list(residual.shape)
        raise ValueError(
            f"a norm wants weight [size] and x and residual [..., size]; given weight "
            f"{list(weight.shape)}, x {list(x.shape)}, residual {given}"
        )
    if x.numel() == 0:
        return
    x, *strides = _rows(x)
    added = x
    if residual is not None:
        added, *residual_strides = _rows(residual)
        strides += residual_strides
    else:
        strides += [0, 0]
    block = triton.next_power_of_2(size)
    _norm[(x.numel() // size,)](
        x,
        added,
        weight.contiguous(),
        out,
        out if total is None else total,
        x.shape[1] if x.dim() == 3 else 1,
        *strides,
        eps,
        SIZE=size,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=num_warps(block),
    )


def num_warps(block: int) -> int:
    """Of a program whose rows have `block` columns: the order of a row's sum depends on it."""
    return min(max(block // 512, 1), 16)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """x as [rows, size] or [outer, inner, size] with contiguous rows, and its strides."""
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() != 3:
        x = x.view(-1, x.shape[-1]) if x.dim() != 2 else x
        return x, x.stride(0), 0
    return x, x.stride(0), x.stride(1)
