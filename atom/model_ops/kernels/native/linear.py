"""Matrix products that stream the weights once for all rows."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import torch
import torch.nn.functional as F

from atom.model_ops.kernels.native.bindings import constant, kernels, mismatch, rows_apart
from atom.model_ops.registry import OpQuery

LinearOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# Rows from which a processor with matrix tiles is faster through torch.
_AMX_FROM_ROWS = 64


def refuses(query: OpQuery) -> str | None:
    size = query.shape["in_features"]
    return f"in_features={size} is no multiple of 32" if size % 32 else None


def load() -> LinearOp:
    by_dtype = kernels("linear")
    pack = Struct("4P5q").pack
    num_threads = torch.get_num_threads

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K], weight [N, K], bias [N] -> x @ weight.T + bias, [M, N].

        Sums are float32 and rounded once. A row's result has the same bits for every M.

        Raises:
            ValueError: when shapes or data types differ.
        """
        rows, size = x.shape
        outs, weight_size = weight.shape
        dtype = x.dtype
        if size != weight_size or dtype is not weight.dtype or not weight.is_contiguous():
            raise mismatch("linear", x=x, weight=weight)
        bias_at = 0
        if bias is not None:
            if bias.numel() != outs or bias.dtype is not dtype:
                raise mismatch("linear", weight=weight, bias=bias)
            bias_at = bias.data_ptr()
        stride = size
        if not x.is_contiguous():
            x, stride = rows_apart(x)
        out = x.new_empty(rows, outs)
        pointers = x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr()
        by_dtype[dtype](pack(*pointers, rows, size, outs, stride, num_threads()))
        return out

    return _with_tiles(linear) if constant("has_amx") else linear


def _with_tiles(few_rows: LinearOp) -> LinearOp:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `few_rows`; many rows of bfloat16 go to torch, which rounds otherwise."""
        if x.shape[0] >= _AMX_FROM_ROWS and x.dtype is torch.bfloat16:
            return F.linear(x, weight, bias)
        return few_rows(x, weight, bias)

    return linear
