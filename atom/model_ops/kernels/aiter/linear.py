"""Matrix products by aiter, which looks the shape up among its tuned ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atom.model_ops.kernels.aiter import probe

LinearOp = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


def load() -> LinearOp:
    gemm = probe.function("gemm_a16w16")

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ weight.T + bias`, x [..., in] -> [..., out].

        Takes for granted that the product leaves in the type of `x` when `otype` says so.
        """
        rows = x.reshape(-1, x.shape[-1])
        out: torch.Tensor = gemm(rows, weight, bias=bias, otype=x.dtype)
        return out.view(*x.shape[:-1], weight.shape[0])

    return linear
