"""Matrix products with aiter, which has a table of tuned shapes."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.aiter.probe import EntryPoint, function
from atom.model_ops.kernels.aiter.support import requires

_GEMM = EntryPoint("aiter.tuned_gemm:gemm_a16w16", "A B", "bias otype")

refuses = requires(_GEMM)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`, x [..., in] -> [..., out].

    Assumes that the result has the dtype `otype`.
    """
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = function(_GEMM)(rows, weight, bias=bias, otype=x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])
