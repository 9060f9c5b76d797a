"""The steps between sampling and the next drafts, a launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 128  # sequences or rows of a program
_SEQUENCES = 32  # of a program that compares drafts
_COLUMNS = 16  # drafts that are compared at once


@triton.jit(
    do_not_specialize=["num_sequences", "num_drafts", "draft_stride"],
    do_not_specialize_on_alignment=["sampled_ptr", "drafts_ptr", "table_ptr", "limits_ptr"],
)
def _verify(
    sampled_ptr, drafts_ptr, table_ptr, limits_ptr, token_ids_ptr, accepted_ptr,
    num_sequences, num_drafts, draft_stride,
    HAS_TABLE: tl.constexpr, HAS_LIMITS: tl.constexpr,
    SEQUENCES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of the sequences. The first draft that differs ends the accepted ones."""
    sequence = (tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)).to(tl.int64)
    is_sequence = sequence < num_sequences
    accepted = tl.zeros((SEQUENCES,), tl.int64) + num_drafts
    for start in range(0, num_drafts + 1, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = is_sequence[:, None] & (column <= num_drafts)
        place = sequence[:, None] * (num_drafts + 1) + column
        row = place
        if HAS_TABLE:
            row = tl.load(table_ptr + place, mask=inside, other=0)
        token_id = tl.load(sampled_ptr + row, mask=inside, other=0)
        is_draft = inside & (column < num_drafts)
        draft = tl.load(
            drafts_ptr + sequence[:, None] * draft_stride + column, mask=is_draft, other=0
        )
        tl.store(token_ids_ptr + place, token_id, mask=inside)
        differs = is_draft & (token_id != draft)
        first = tl.min(tl.where(differs, column.to(tl.int64), num_drafts), axis=1)
        accepted = tl.minimum(accepted, first)
    if HAS_LIMITS:
        limit = tl.load(limits_ptr + sequence, mask=is_sequence, other=0)
        accepted = tl.minimum(accepted, limit)
    tl.store(accepted_ptr + sequence, accepted, mask=is_sequence)


@triton.jit(
    do_not_specialize=["num_rows", "num_sequences", "width"],
    do_not_specialize_on_alignment=[
        "next_ids_ptr", "indices_ptr", "sampled_ptr", "accepted_ptr", "table_ptr",
    ],
)  # fmt: skip
def _place(
    next_ids_ptr, indices_ptr, sampled_ptr, accepted_ptr, table_ptr, last_ptr,
    num_rows, num_sequences, width,
    HAS_TABLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of the rows of logits, of which there are at least as many as sequences."""
    index = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = index < num_rows
    row = tl.load(indices_ptr + index, mask=is_row, other=0)
    token_id = tl.load(sampled_ptr + index, mask=is_row, other=0)
    tl.store(next_ids_ptr + row, tl.maximum(token_id, 0), mask=is_row)
    is_sequence = index < num_sequences
    newest = index * width + tl.load(accepted_ptr + index, mask=is_sequence, other=0)
    if HAS_TABLE:
        newest = tl.load(table_ptr + newest, mask=is_sequence, other=0)
    last = tl.load(indices_ptr + newest, mask=is_sequence, other=0)
    tl.store(last_ptr + index, last, mask=is_sequence)


@triton.jit(
    do_not_specialize=["num_sequences", "distance", "mask_token_id", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["first_ids_ptr", "positions_ptr", "counts_ptr"],
)
def _place_drafts(
    first_ids_ptr, positions_ptr, tables_ptr, counts_ptr,
    token_ids_ptr, inside_ptr, slots_ptr, lens_ptr, starts_ptr,
    num_sequences, distance, num_rows, mask_token_id, table_stride, table_width, block_size,
    max_model_len,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of the rows of all sequences and one more."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    sequence, ahead = row // num_rows, row % num_rows
    mask = sequence < num_sequences
    count = tl.load(counts_ptr + sequence, mask=mask, other=0).to(tl.int64)
    limit = tl.minimum(count * block_size, max_model_len)
    first = tl.load(positions_ptr + sequence, mask=mask, other=0) + distance
    wanted = first + ahead
    inside = tl.maximum(tl.minimum(wanted, limit - 1), 0)
    entry = sequence * table_stride + inside // block_size
    block = tl.load(tables_ptr + entry, mask=mask & (wanted < limit), other=0)
    slot = block.to(tl.int64) * block_size + inside % block_size
    first_id = tl.load(first_ids_ptr + sequence, mask=mask, other=0)
    tl.store(token_ids_ptr + row, tl.where(ahead == 0, first_id, mask_token_id), mask=mask)
    tl.store(inside_ptr + row, inside, mask=mask)
    tl.store(slots_ptr + row, tl.where(wanted < limit, slot, -1), mask=mask)
    is_first = ahead == 0
    tl.store(starts_ptr + sequence, row.to(tl.int32), mask=is_first & (sequence <= num_sequences))
    nothing = tl.minimum(tl.minimum(num_rows, table_width * block_size), max_model_len)
    length = tl.where(limit == 0, nothing, tl.minimum(first + num_rows, limit))
    tl.store(lens_ptr + sequence, length.to(tl.int32), mask=is_first & mask)


def verify_drafts(
    sampled: torch.Tensor,
    drafts: torch.Tensor | None,
    table: torch.Tensor | None,
    limits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in `kernels/torch/speculation.py`; rows of drafts may be apart.

    Raises:
        ValueError: when shapes do not fit.
    """
    if drafts is None:
        return sampled[:, None], torch.zeros_like(sampled)
    count, most = drafts.shape
    _check_rows("verify_drafts", sampled, count, most + 1, table)
    if most and drafts.stride(1) != 1:
        drafts = drafts.contiguous()
    token_ids = sampled.new_empty(count, most + 1)
    accepted = sampled.new_empty(count)
    if count:
        _verify[(triton.cdiv(count, _SEQUENCES),)](
            sampled,
            drafts,
            sampled if table is None else table,
            sampled if limits is None else limits,
            token_ids,
            accepted,
            count,
            most,
            drafts.stride(0),
            HAS_TABLE=table is not None,
            HAS_LIMITS=limits is not None,
            SEQUENCES=_SEQUENCES,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return token_ids, accepted


def place_samples(
    next_token_ids: torch.Tensor,
    logits_indices: torch.Tensor,
    sampled: torch.Tensor,
    num_accepted: torch.Tensor,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """As in `kernels/torch/speculation.py`; all tensors contiguous.

    Raises:
        ValueError: when shapes do not fit.
    """
    num_rows, count = len(logits_indices), len(num_accepted)
    width = num_rows // max(count, 1) if table is None else table.shape[1]
    _check_rows("place_samples", sampled, count, width, table)
    if len(sampled) != num_rows:
        raise ValueError(f"place_samples wants a sample for each of {num_rows} rows")
    last = torch.empty_like(num_accepted)
    if num_rows:
        _place[(triton.cdiv(num_rows, _ROWS),)](
            next_token_ids,
            logits_indices,
            sampled,
            num_accepted,
            sampled if table is None else table,
            last,
            num_rows,
            count,
            width,
            HAS_TABLE=table is not None,
            ROWS=_ROWS,
            num_warps=4,
        )
    return last


def place_drafts(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    block_counts: torch.Tensor,
    distance: int,
    num_rows: int,
    mask_token_id: int,
    block_size: int,
    max_model_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As in `kernels/torch/speculation.py`; rows of block tables may be apart."""
    count, width = block_tables.shape
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    placed, inside, slots = (positions.new_empty(count * num_rows) for _ in range(3))
    lens, starts = block_counts.new_empty(count), block_counts.new_empty(count + 1)
    _place_drafts[(triton.cdiv(count * num_rows + 1, _ROWS),)](
        token_ids.contiguous(),
        positions.contiguous(),
        block_tables,
        block_counts.contiguous(),
        placed,
        inside,
        slots,
        lens,
        starts,
        count,
        distance,
        num_rows,
        mask_token_id,
        block_tables.stride(0),
        width,
        block_size,
        max_model_len,
        ROWS=_ROWS,
        num_warps=4,
    )
    return placed, inside, slots, lens, starts


def _check_rows(
    op: str, sampled: torch.Tensor, count: int, width: int, table: torch.Tensor | None
) -> None:
    fits = len(sampled) == count * width if table is None else table.shape == (count, width)
    if not fits or not sampled.is_contiguous() or not (table is None or table.is_contiguous()):
        rows = "no table" if table is None else f"a table {list(table.shape)} {table.stride()}"
        raise ValueError(
            f"{op} wants contiguous samples of {count} sequences with {width} rows each; given "
            f"{len(sampled)} samples {sampled.stride()} and {rows}"
        )
