"""Rows of tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """input_ids [T] int64, weight [V, hidden] -> [T, hidden]."""
    return F.embedding(input_ids, weight)


def sampling_options(
    options: torch.Tensor, seeds: torch.Tensor, rows: torch.Tensor, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """options [kinds, N] float32 and seeds [N] int64 of rows [R] int64: [kinds, n R] and [n R].

    Args:
        repeats: n, how often each row comes, one after the other.
    """
    if repeats > 1:
        rows = rows.repeat_interleave(repeats)
    return options.index_select(1, rows), seeds.index_select(0, rows)


def share_embedding(
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """input_ids [T] int64, weight [V, hidden] of the tokens from `start` on -> [T, hidden], which
    is 0 for other tokens.

    Args:
        embedding: the op of this name.
    """
    return own_rows(input_ids, start, len(weight), lambda ids: embedding(ids, weight))


def own_rows(
    input_ids: torch.Tensor,
    start: int,
    count: int,
    lookup: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """As `share_embedding`, of `count` tokens whose rows [T, hidden] `lookup` returns."""
    local = input_ids - start
    absent = (local < 0) | (local >= count)
    return lookup(local.masked_fill(absent, 0)).masked_fill_(absent[:, None], 0)


def window_places(
    of_block: torch.Tensor, block_tables: torch.Tensor, slots: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables [B, W] int32 and slots [T] int64 in the blocks `of_block` [N] int32; slot -1
    stays.
    """
    tables = of_block.index_select(0, block_tables.flatten()).view(block_tables.shape)
    blocks = of_block.index_select(0, slots.clamp(min=0) // block_size)
    own = blocks.long() * block_size + slots % block_size
    return tables, torch.where(slots < 0, slots, own)


def mrope_table(
    cos_sin: torch.Tensor, positions: torch.Tensor, shifts: torch.Tensor, axes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of angles for each token, and the tokens' rows in it.

    Args:
        cos_sin: [N, d] float32, the angles of places.
        positions: [T] int64.
        shifts: [T, 3] int64, what is added to a token's position for its place on three axes.
        axes: [d] int64, on which of them the place is whose number a column has.

    Returns:
        [T, d] float32, and 0, 1, ..., [T] int64.
    """
    places = (positions[:, None] + shifts)[:, axes]
    rows = torch.arange(len(positions), device=positions.device)
    return cos_sin.gather(0, places), rows


def take_inputs(
    tables: torch.Tensor,
    rows: torch.Tensor,
    block_tables: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sources: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and positions [T] int64 of the rows `sources` [T] int64; `block_tables` [B, W]
    int32 gets the rows `rows` [B] int64 of `tables` [N, W].
    """
    torch.index_select(tables, 0, rows, out=block_tables)
    return input_ids[sources], positions[sources]
