"""Rows of tables, checked and copied in one call."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels, mismatch, num_threads

_gather = Kernels("gather_rows", "3P5q")
_window_places = Kernels("window_places", "5P4q")
_mrope_table = Kernels("mrope_table", "6P3q")
_options = Kernels("sampling_options", "5P3q")


def gather_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`source[index]`, for rows [N, ...] that are contiguous and index [R] int64.

    Raises:
        ValueError: when shapes or types do not fit.
        IndexError: for an index that is no row.
    """
    if (
        index.dtype is not torch.int64
        or index.dim() != 1
        or not index.is_contiguous()
        or not source[:1].is_contiguous()
    ):
        raise mismatch("gather_rows", source=source, index=index)
    out = source.new_empty(index.shape[0], *source.shape[1:])
    item = source.element_size()
    row_bytes = source[:1].numel() * item
    wrong = _gather(
        None,
        *(index.data_ptr(), source.data_ptr(), out.data_ptr()),
        *(index.shape[0], source.shape[0], row_bytes, source.stride(0) * item, num_threads()),
    )
    if wrong:
        raise IndexError(f"{int(index[wrong - 1])} is none of {source.shape[0]} rows")
    return out


def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input_ids [T] int64, weight [V, hidden] -> [T, hidden].

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for an id outside the table.
    """
    return gather_rows(weight, input_ids.contiguous())


def window_places(
    of_block: torch.Tensor, block_tables: torch.Tensor, slots: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables [B, W] int32 and slots [T] int64 in the blocks `of_block` [N] int32; slot -1
    stays.

    Raises:
        ValueError: when data types do not fit.
        IndexError: for a block that is not in the map.
    """
    if (
        of_block.dtype is not torch.int32
        or block_tables.dtype is not torch.int32
        or slots.dtype is not torch.int64
        or not (of_block.is_contiguous() and block_tables.is_contiguous())
        or not slots.is_contiguous()
    ):
        raise mismatch("window_places", of_block=of_block, block_tables=block_tables, slots=slots)
    tables, own = block_tables.new_empty(*block_tables.shape), slots.new_empty(*slots.shape)
    inputs = of_block.data_ptr(), block_tables.data_ptr(), slots.data_ptr()
    sizes = of_block.numel(), block_tables.numel(), slots.numel(), block_size
    if wrong := _window_places(None, *inputs, tables.data_ptr(), own.data_ptr(), *sizes):
        raise IndexError(f"number {wrong} of the tables and slots is in no block of the map")
    return tables, own


def mrope_table(
    cos_sin: torch.Tensor, positions: torch.Tensor, shifts: torch.Tensor, axes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of cos_sin [N, d] float32 the rows of tokens' places on three axes, those of positions [T]
    int64 and shifts [T, 3] int64 -> [T, d], and 0, 1, ..., [T]; axes [d] int64 says which of the
    three a column is of.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a place outside the table.
    """
    table_rows, width = cos_sin.shape
    (count,) = positions.shape
    whole = torch.int64
    if (
        cos_sin.dtype is not torch.float32
        or not positions.dtype is shifts.dtype is axes.dtype is whole
        or shifts.shape != (count, 3)
        or axes.shape != (width,)
        or not all(t.is_contiguous() for t in (cos_sin, positions, shifts, axes))
    ):
        given = {"cos_sin": cos_sin, "positions": positions, "shifts": shifts, "axes": axes}
        raise mismatch("mrope_table", **given)
    table, rows = cos_sin.new_empty(count, width), positions.new_empty(count)
    inputs = cos_sin.data_ptr(), positions.data_ptr(), shifts.data_ptr(), axes.data_ptr()
    outputs = table.data_ptr(), rows.data_ptr()
    if wrong := _mrope_table(None, *inputs, *outputs, count, width, table_rows):
        token = wrong - 1
        raise IndexError(
            f"places {(positions[token] + shifts[token]).tolist()} of token {token} lie outside "
            f"the rotary table, which has {table_rows}"
        )
    return table, rows


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
