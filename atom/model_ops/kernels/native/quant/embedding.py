"""Rows of packed quantised weights."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads
from atom.model_ops.kernels.native.quant.pack import PackedWeights

_embedding = Kernels("quant_embedding", "8P15q")


def quant_embedding(ids: torch.Tensor, weights: PackedWeights, dtype: torch.dtype) -> torch.Tensor:
    """Rows of what `quant_logits` multiplies: ids [T] int64 -> [T, in] of `dtype`.

    Raises:
        IndexError: when there is no such row.
        ValueError: when ids are of another type.
    """
    if ids.dtype is not torch.int64 or not ids.is_contiguous():
        raise mismatch("quant_embedding", ids=ids)
    count = ids.numel()
    out = ids.new_empty(count, weights.in_features, dtype=dtype)
    wrong = _embedding(
        dtype,
        ids.data_ptr(),
        *weights.addresses(),
        out.data_ptr(),
        count,
        *weights.sizes,
        num_threads(),
    )
    if wrong:
        raise IndexError(
            f"row {ids[wrong - 1].item()} of a matrix of {weights.out_features}, at {wrong - 1}"
        )
    return out
