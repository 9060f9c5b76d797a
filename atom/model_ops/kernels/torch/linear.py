"""Matrix products in plain torch."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

# Without native bfloat16 or float16 products torch uses scalar code, which is only hidden by
# reading the weights when there are few rows. From here on, float32 copies of the weights are
# faster.
_UPCAST_FROM_ROWS = 6
_UPCAST_CHUNK = 4096
# Rows of an output head at a time, so that their float32 copy stays in a second-level cache.
_HEAD_CHUNK_BYTES = 2**20
# Of the largest logit: sums of float32 are well below it, results of 16 bits above.
_LOGIT_ERROR = 1e-4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in], weight [out, in], bias [out] -> `x @ weight.T + bias`, [..., out]."""
    platform = current_platform()
    if platform.is_gpu or platform.has_native_bf16:
        return F.linear(x, weight, bias)
    return linear_upcast(x, weight, bias)


def linear_upcast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` for processors with native float32 products only."""
    if weight.dtype == torch.float32 or x.shape[0] < _UPCAST_FROM_ROWS:
        return F.linear(x, weight, bias)
    wide = x.float()
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], _UPCAST_CHUNK):
        rows = weight[start : start + _UPCAST_CHUNK].float()
        part = None if bias is None else bias[start : start + _UPCAST_CHUNK].float()
        out[:, start : start + rows.shape[0]] = F.linear(wide, rows, part)
    return out


def refuses_logits(query: OpQuery) -> str | None:
    """Why `logits` cannot run; None if it can. On ROCm a small product is compared, once."""
    if query.platform.kind != "rocm" or torch.version.hip is None or query.dtype == torch.float32:
        return None
    return wide_product_fault(query.platform.device, query.dtype)


@functools.cache
def wide_product_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with products of `dtype` whose results are float32; None if nothing is."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 256, generator=generator).to(dtype) for n in (16, 64))
    try:
        found = torch.mm(x.to(device), weight.to(device).T, out_dtype=torch.float32).cpu()
    except (RuntimeError, TypeError) as error:
        return f"torch.mm with float32 results fails: {str(error).partition(chr(10))[0]}"
    wanted = x.double() @ weight.double().T
    off = float((found.double() - wanted).abs().max() / wanted.abs().max())
    if found.dtype is torch.float32 and off < _LOGIT_ERROR:
        return None
    return f"torch.mm with float32 results is off by {off:.1e} of the largest in {found.dtype}"


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [R, in], weight [V, in] -> `x @ weight.T`, [R, V] float32, not rounded in between."""
    if weight.dtype is torch.float32:
        return F.linear(x, weight)
    if x.device.type != "cpu":  # also where only shapes are computed
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    wide = x.float()
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    chunk = max(1, _HEAD_CHUNK_BYTES // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], chunk):
        rows = weight[start : start + chunk].float()
        out[:, start : start + chunk] = F.linear(wide, rows)
    return out
