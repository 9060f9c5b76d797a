"""Gated activations, and the mixture of residuals: float32 inside, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.moe_splits import gate_times_up
from atom.model_ops.kernels.triton.rms_norm import LARGEST_ROW
from atom.model_ops.registry import OpQuery

_LARGEST_TILE = 1024


def refuses_mix(query: OpQuery) -> str | None:
    """Why rows of this size are not supported; None if they are."""
    size = query.shape["size"]
    return f"size={size} is larger than {LARGEST_ROW}" if size > LARGEST_ROW else None


@triton.jit
def _gate_and_mul(
    x_ptr,
    out_ptr,
    row_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    """Grid: rows, tiles of the SIZE outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < SIZE
    gates = x_ptr + row * row_stride + columns
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=mask, other=0.0).to(tl.float32)
    result = gate_times_up(gate, up, BETA, LINEAR_BETA)
    tl.store(out_ptr + row * SIZE + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * size], gate beside up, rows dense -> silu(gate) * up, [T, size]."""
    return _run(x, 0.0, 0.0)


def situ_and_mul(x: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """The same with beta tanh(gate / beta) sigmoid(gate) and linear_beta tanh(up / linear_beta)."""
    return _run(x, beta, linear_beta)


def _run(x: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    rows, width = x.shape
    size = width // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = min(triton.next_power_of_2(size), _LARGEST_TILE)
    _gate_and_mul[(rows, triton.cdiv(size, tile))](
        x,
        out,
        x.stride(0),
        SIZE=size,
        TILE=tile,
        BETA=beta,
        LINEAR_BETA=linear_beta,
        num_warps=4,
    )
    return out


@triton.jit
def _mix_residuals(
    closed_ptr,
    running_ptr,
    norm_ptr,
    proj_ptr,
    out_ptr,
    eps,
    num_rows,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows. The mixture of a row's sources, of which the last is the running one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    weight = norm * tl.load(proj_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(running_ptr + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    largest = tl.sum(x * weight, axis=0) / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    total = largest * 0.0 + 1.0
    mixed = x
    for i in range(COUNT):
        place = closed_ptr + (i * num_rows + row) * SIZE
        x = tl.load(place + columns, mask=mask, other=0.0).to(tl.float32)
        score = tl.sum(x * weight, axis=0) / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
        new = tl.maximum(largest, score)
        old, share = tl.exp(largest - new), tl.exp(score - new)
        mixed = mixed * old + x * share
        total = total * old + share
        largest = new
    result = (mixed / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + columns, result, mask=mask)


def mix_residuals(
    closed: torch.Tensor,
    running: torch.Tensor,
    norm: torch.Tensor,
    proj: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The mixture of closed [n, T, size] and running [T, size] by the softmax of their scores,
    [T, size]: a score is the product of a row's norm with proj.

    Args:
        closed, running: contiguous.
        norm: [size], its weight.
        proj: [1, size].
    """
    rows, size = running.shape
    out = torch.empty_like(running)
    if rows:
        _mix_residuals[(rows,)](
            closed,
            running,
            norm,
            proj,
            out,
            eps,
            rows,
            COUNT=closed.shape[0],
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=8,
        )
    return out
