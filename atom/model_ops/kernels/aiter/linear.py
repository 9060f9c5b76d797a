"""Matrix products with aiter: a table of tuned shapes, and a kernel for few rows."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.aiter.support import COMPUTE_UNITS, requires
from atom.model_ops.kernels.probe import EntryPoint, function, refusal
from atom.model_ops.registry import OpQuery

_GEMM = EntryPoint("aiter.tuned_gemm:gemm_a16w16", "A B", "bias otype")
_TUNED = EntryPoint("aiter.tuned_gemm:get_GEMM_A16W16_config", "M N K bias dtype otype")
_FEW_ROWS = EntryPoint("aiter.ops.custom:wvSpltK", "in_a in_b out_c N_in CuCount")

# The kernel is compiled for 1 to 4 rows.
_MOST_ROWS = 4
# It loads so many inputs at once, and makes up to 7 outputs at once, the last ones twice.
_VECTOR, _LEAST_OUTPUTS = 8, 16
# It counts weights in 32 bits.
_MOST_WEIGHTS = 2**32
# Numbers of rows that the table of ops asks aiter's table for, from small batches to prompts.
_SAMPLED_ROWS = (8, 64, 512, 4096)


def _refuses_sizes(query: OpQuery) -> str | None:
    """Why the kernel for few rows cannot run; None if it can."""
    inputs, outputs = query.shape["in_features"], query.shape["out_features"]
    if inputs % _VECTOR:
        return f"few rows: in_features={inputs} is no multiple of {_VECTOR}"
    if outputs < _LEAST_OUTPUTS:
        return f"few rows: out_features={outputs} is below {_LEAST_OUTPUTS}"
    if inputs * outputs > _MOST_WEIGHTS:
        return f"few rows: {inputs} x {outputs} weights are more than {_MOST_WEIGHTS}"
    return None


refuses = requires(_GEMM)
refuses_few_rows = requires(_GEMM, _TUNED, _FEW_ROWS, COMPUTE_UNITS, also=_refuses_sizes)


def note(query: OpQuery) -> str:
    """What the table of ops says of a shape that aiter has no measured kernel for."""
    if refusal(_TUNED):
        return ""
    outputs, inputs = query.shape["out_features"], query.shape["in_features"]
    if any(_is_tuned(rows, outputs, inputs, query.dtype) for rows in _SAMPLED_ROWS):
        return ""
    return f"aiter has tuned none of {', '.join(map(str, _SAMPLED_ROWS))} rows: torch's product"


def note_few_rows(query: OpQuery) -> str:
    """What the table of ops says of `linear_few_rows`."""
    few = f"up to {_MOST_ROWS} rows by wvSpltK, unless aiter has tuned the shape"
    return "; ".join(filter(None, (few, note(query))))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`, x [..., in] -> [..., out].

    Assumes that the result has the dtype `otype`.
    """
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = function(_GEMM)(rows, weight, bias=bias, otype=x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear`, where up to 4 rows are multiplied at the speed at which weights are read.

    Only shapes for which aiter's table has no measured kernel: those it leaves to torch. The kernel
    adds no bias. It keeps what fits of the rows in 64 KiB of shared memory and loads the rest in
    turns, so any number of inputs will do. Assumes that it rounds sums in float32 once, and that
    the number of compute units is only the number of its groups.
    """
    rows = x.reshape(-1, x.shape[-1])
    count, outputs = rows.shape[0], weight.shape[0]
    if bias is not None or not 1 <= count <= _MOST_ROWS:
        return linear(x, weight, bias)
    if _is_tuned(count, outputs, weight.shape[1], weight.dtype):
        return linear(x, weight, bias)
    out = rows.new_empty(count, outputs)
    _multiply_few(rows, weight, out)
    return out.view(*x.shape[:-1], outputs)


def linear_few_rows_into(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """`linear_few_rows` written to `out`; copied where aiter's table has a kernel of its own."""
    rows = x.reshape(-1, x.shape[-1])
    outputs, inputs = weight.shape
    is_tuned = bias is None and _is_tuned(rows.shape[0], outputs, inputs, weight.dtype)
    if bias is not None or is_tuned or not out.is_contiguous():
        out.copy_(linear_few_rows(x, weight, bias))
    elif 1 <= rows.shape[0] <= _MOST_ROWS:
        _multiply_few(rows, weight, out)
    else:
        torch.mm(rows, weight.T, out=out.view(-1, weight.shape[0]))


def _multiply_few(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    count, units = rows.shape[0], function(COMPUTE_UNITS)()
    function(_FEW_ROWS)(weight, rows.contiguous(), out, count, units)


def _is_tuned(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether aiter has a kernel of its own for a product without a bias."""
    chosen = function(_TUNED)(rows, outputs, inputs, False, str(dtype), str(dtype))
    return bool(chosen["libtype"] != "torch")
