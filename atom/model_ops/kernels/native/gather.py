"""Rows of tables, checked and copied in one call."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels, mismatch
from atom.model_ops.kernels.native.movement import gather_rows

_options = Kernels("sampling_options", "5P3q")


def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input_ids [T] int64, weight [V, hidden] -> [T, hidden].

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for an id outside the table.
    """
    return gather_rows(weight, input_ids.contiguous())


def sampling_options(
    options: torch.Tensor, seeds: torch.Tensor, rows: torch.Tensor, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """options [kinds, N] float32 and seeds [N] int64 of rows [R] int64: [kinds, n R] and [n R],
    where each row comes `repeats` = n times.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a row outside the tables.
    """
    if repeats > 1:
        rows = rows.repeat_interleave(repeats)
    (kinds, capacity), (count,) = options.shape, rows.shape
    if (
        options.dtype is not torch.float32
        or seeds.dtype is not torch.int64
        or rows.dtype is not torch.int64
        or seeds.shape != (capacity,)
        or not (options.is_contiguous() and seeds.is_contiguous() and rows.is_contiguous())
    ):
        raise mismatch("sampling_options", options=options, seeds=seeds, rows=rows)
    own_options, own_seeds = options.new_empty(kinds, count), seeds.new_empty(count)
    inputs = options.data_ptr(), seeds.data_ptr(), rows.data_ptr()
    outputs = own_options.data_ptr(), own_seeds.data_ptr()
    if wrong := _options(None, *inputs, *outputs, kinds, capacity, count):
        raise IndexError(f"row {int(rows[wrong - 1])} is outside 0..{capacity - 1}")
    return own_options, own_seeds
