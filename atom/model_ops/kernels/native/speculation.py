"""The steps between sampling and the next drafts, a call each."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels, mismatch

_verify = Kernels("verify_drafts", "5P3q")
_place = Kernels("place_samples", "6P4q")
_place_drafts = Kernels("place_drafts", "9P8q")


def verify_drafts(
    sampled: torch.Tensor,
    drafts: torch.Tensor | None,
    table: torch.Tensor | None,
    limits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sampled [R] -> each sequence's tokens [S, k + 1], and how many drafts [S] are accepted, of
    which `limits` [S] are the most.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when the table names a row that does not exist.
    """
    num_rows = sampled.numel()
    drafts = None if drafts is None else drafts.contiguous()
    count, most = (num_rows, 0) if drafts is None else drafts.shape
    if not _are_integers(sampled, drafts, table) or (
        num_rows != count * (most + 1) if table is None else table.shape != (count, most + 1)
    ):
        raise _mismatch("verify_drafts", sampled=sampled, drafts=drafts, table=table)
    accepted = sampled.new_empty(count)
    token_ids = sampled.view(count, most + 1) if table is None else torch.empty_like(table)
    inputs = [0 if t is None else t.data_ptr() for t in (sampled, drafts, table)]
    outputs = token_ids.data_ptr(), accepted.data_ptr()
    if wrong := _verify(None, *inputs, *outputs, count, most, num_rows):
        assert table is not None
        raise IndexError(f"sequence {wrong - 1} has rows {table[wrong - 1].tolist()} of {num_rows}")
    return token_ids, accepted if limits is None else accepted.minimum(limits)


def place_samples(
    next_token_ids: torch.Tensor,
    logits_indices: torch.Tensor,
    sampled: torch.Tensor,
    num_accepted: torch.Tensor,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Write sampled tokens behind their rows, in place -> the row [S] of each newest token.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: for a row that does not exist.
    """
    num_rows, count = logits_indices.numel(), num_accepted.numel()
    width = num_rows // max(count, 1) if table is None else table.shape[1]
    given = next_token_ids, logits_indices, sampled, num_accepted, table
    if (
        not _are_integers(*given)
        or sampled.numel() != num_rows
        or (num_rows != count * width if table is None else table.shape[0] != count)
    ):
        names = "next_token_ids", "logits_indices", "sampled", "num_accepted", "table"
        raise _mismatch("place_samples", **dict(zip(names, given, strict=True)))
    last_rows = num_accepted.new_empty(count)
    tokens = next_token_ids.data_ptr(), logits_indices.data_ptr(), sampled.data_ptr()
    table_at = 0 if table is None else table.data_ptr()
    pointers = *tokens, num_accepted.data_ptr(), table_at, last_rows.data_ptr()
    sizes = next_token_ids.numel(), num_rows, count, width
    if wrong := _place(None, *pointers, *sizes):
        raise IndexError(f"row or sequence {wrong - 1}: no such row of {num_rows} rows of logits")
    return last_rows


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
    """As in `kernels/torch/speculation.py`.

    Raises:
        ValueError: when shapes or data types do not fit.
        IndexError: when a sequence has more blocks than its table.
    """
    count, width = block_tables.shape
    _check_sequences("place_drafts", block_tables, block_counts, token_ids, positions)
    placed, inside, slots = (positions.new_empty(count * num_rows) for _ in range(3))
    lens, starts = torch.empty_like(block_counts), block_counts.new_empty(count + 1)
    inputs = token_ids.data_ptr(), positions.data_ptr()
    tables = block_tables.data_ptr(), block_counts.data_ptr()
    rows = placed.data_ptr(), inside.data_ptr(), slots.data_ptr()
    pointers = *inputs, *tables, *rows, lens.data_ptr(), starts.data_ptr()
    sizes = count, block_tables.stride(0), width, distance, num_rows, mask_token_id
    if wrong := _place_drafts(None, *pointers, *sizes, block_size, max_model_len):
        have = int(block_counts[wrong - 1])
        raise IndexError(f"sequence {wrong - 1} has {have} blocks, its table {width}")
    return placed, inside, slots, lens, starts


def _check_sequences(
    op: str, block_tables: torch.Tensor, block_counts: torch.Tensor, *per_sequence: torch.Tensor
) -> None:
    count = block_tables.shape[0]
    if (
        any(t.shape != (count,) or t.dtype is not torch.int64 for t in per_sequence)
        or any(not t.is_contiguous() for t in per_sequence)
        or block_counts.shape != (count,)
        or block_counts.dtype is not torch.int32
        or block_tables.dtype is not torch.int32
        or not block_counts.is_contiguous()
        or block_tables.stride(1) != 1
    ):
        given = {"positions": per_sequence[-1], "block_counts": block_counts}
        raise mismatch(op, block_tables=block_tables, **given)


def _are_integers(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or (t.dtype is torch.int64 and t.is_contiguous()) for t in tensors)


def _mismatch(op: str, **tensors: torch.Tensor | None) -> ValueError:
    return mismatch(op, **{name: t for name, t in tensors.items() if t is not None})
