"""Rows of tables, a launch for several."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.support import refuses_parts
from atom.model_ops.registry import OpQuery

_ROWS = 128  # of a program
_COLUMNS = 1024  # at most, that a program copies


def refuses_share(_: OpQuery) -> str | None:
    """Why one kernel cannot look up a share of the vocabulary; None if it can."""
    return refuses_parts("embedding")


@triton.jit(do_not_specialize=["num_rows", "repeats"], do_not_specialize_on_alignment=["rows_ptr"])
def _options(
    options_ptr, seeds_ptr, rows_ptr, own_options_ptr, own_seeds_ptr,
    num_rows, repeats, options_stride,
    KINDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of the rows."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < num_rows
    row = tl.load(rows_ptr + index // repeats, mask=inside, other=0)
    tl.store(own_seeds_ptr + index, tl.load(seeds_ptr + row, mask=inside, other=0), mask=inside)
    for kind in tl.static_range(KINDS):
        value = tl.load(options_ptr + kind * options_stride + row, mask=inside, other=0.0)
        tl.store(own_options_ptr + kind * num_rows + index, value, mask=inside)


@triton.jit(
    do_not_specialize=["num_tokens", "each"],
    do_not_specialize_on_alignment=["rows_ptr", "ids_ptr", "positions_ptr", "sources_ptr"],
)
def _take_inputs(
    tables_ptr, rows_ptr, block_tables_ptr, ids_ptr, positions_ptr, sources_ptr,
    own_ids_ptr, own_positions_ptr,
    table_stride, width, num_tokens, each,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, parts of a block table and one more for `each` tokens."""
    sequence = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == tl.num_programs(1) - 1:
        for start in range(0, each, TOKENS):
            place = start + tl.arange(0, TOKENS)
            token = sequence * each + place
            inside = (place < each) & (token < num_tokens)
            source = tl.load(sources_ptr + token, mask=inside, other=0)
            input_id = tl.load(ids_ptr + source, mask=inside, other=0)
            position = tl.load(positions_ptr + source, mask=inside, other=0)
            tl.store(own_ids_ptr + token, input_id, mask=inside)
            tl.store(own_positions_ptr + token, position, mask=inside)
    else:
        row = tl.load(rows_ptr + sequence)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        block = tl.load(tables_ptr + row * table_stride + column, mask=inside, other=0)
        tl.store(block_tables_ptr + sequence * width + column, block, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _share(
    ids_ptr, weight_ptr, out_ptr, weight_stride, first, count, size, COLUMNS: tl.constexpr
):  # fmt: skip
    """Grid: tokens, parts of a row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(ids_ptr + token) - first
    inside = column < size
    is_own = (row >= 0) & (row < count)
    value = tl.load(weight_ptr + row * weight_stride + column, mask=inside & is_own, other=0.0)
    tl.store(out_ptr + token * size + column, value, mask=inside)


def sampling_options(
    options: torch.Tensor, seeds: torch.Tensor, rows: torch.Tensor, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in `kernels/torch/gather.py`; all tensors contiguous.

    Raises:
        ValueError: when they are not.
    """
    if not (options.is_contiguous() and seeds.is_contiguous() and rows.is_contiguous()):
        raise ValueError(
            f"sampling_options wants contiguous tensors; given options {options.stride()}, seeds "
            f"{seeds.stride()}, rows {rows.stride()}"
        )
    count = len(rows) * repeats
    own_options, own_seeds = options.new_empty(len(options), count), seeds.new_empty(count)
    if count:
        _options[(triton.cdiv(count, _ROWS),)](
            options,
            seeds,
            rows,
            own_options,
            own_seeds,
            count,
            repeats,
            options.stride(0),
            KINDS=len(options),
            ROWS=_ROWS,
            num_warps=4,
        )
    return own_options, own_seeds


def share_embedding(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """As in `kernels/torch/gather.py`; `embedding` is not called."""
    del embedding
    (count, size), num_tokens = weight.shape, len(input_ids)
    out = weight.new_empty(num_tokens, size)
    if num_tokens:
        columns = min(triton.next_power_of_2(size), _COLUMNS)
        _share[(num_tokens, triton.cdiv(size, columns))](
            input_ids.contiguous(),
            weight,
            out,
            weight.stride(0),
            start,
            count,
            size,
            COLUMNS=columns,
            num_warps=4,
        )
    return out


def take_inputs(
    tables: torch.Tensor,
    rows: torch.Tensor,
    block_tables: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sources: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in `kernels/torch/gather.py`; rows of `tables` may be apart, all else is contiguous.

    Raises:
        ValueError: when shapes do not fit.
    """
    (count, width), num_tokens = block_tables.shape, len(sources)
    if tables.shape[1] != width or tables.stride(1) != 1 or not block_tables.is_contiguous():
        raise ValueError(
            f"take_inputs wants tables with {width} contiguous columns, and contiguous block "
            f"tables; given {list(tables.shape)} {tables.stride()} and {block_tables.stride()}"
        )
    own_ids, own_positions = torch.empty_like(sources), torch.empty_like(sources)
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    _take_inputs[(count, triton.cdiv(width, columns) + 1)](
        tables,
        rows,
        block_tables,
        input_ids,
        positions,
        sources,
        own_ids,
        own_positions,
        tables.stride(0),
        width,
        num_tokens,
        triton.cdiv(num_tokens, count),
        COLUMNS=columns,
        TOKENS=16,
        num_warps=4,
    )
    return own_ids, own_positions
