"""Gated activation: float32 inside, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LARGEST_TILE = 1024


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, row_stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid: rows, tiles of the SIZE outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < SIZE
    gates = x_ptr + row * row_stride + columns
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * size], gate beside up, rows dense -> silu(gate) * up, [T, size]."""
    rows, width = x.shape
    size = width // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = min(triton.next_power_of_2(size), _LARGEST_TILE)
    _silu_and_mul[(rows, triton.cdiv(size, tile))](
        x, out, x.stride(0), SIZE=size, TILE=tile, num_warps=4
    )
    return out
