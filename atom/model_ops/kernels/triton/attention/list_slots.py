"""Where the cached tokens of several sequences are, for kernels that read one token at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "starts_ptr", "padding_ptr"],
)
def _list_slots(
    tables_ptr, lens_ptr, starts_ptr, padding_ptr, slots_ptr, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, tiles of tokens."""
    sequence = tl.program_id(0)
    context = tl.load(lens_ptr + sequence)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tokens < context
    if tl.program_id(1) * TILE >= context:
        return
    stored = tokens
    if padding_ptr is not None:
        stored = tl.minimum(tokens, context - tl.load(padding_ptr + sequence) - 1)
    table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + stored // BLOCK_SIZE, mask=inside, other=0)
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    tl.store(slots_ptr + first + tokens, blocks * BLOCK_SIZE + stored % BLOCK_SIZE, mask=inside)


def list_slots(
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    starts: torch.Tensor,
    block_size: int,
    max_context_len: int,
    count: int,
    padding_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slots of all tokens, sequence by sequence: [count] int32, undefined behind the last.

    Only what is written costs time, however far the bounds are; no host sync. The pool has at most
    2^31 slots.

    Args:
        block_tables: [N, width] int32.
        context_lens: [N] int32, each at most `max_context_len`.
        starts: [N + 1] int32, where each sequence's tokens begin.
        count: of all tokens, or an upper bound.
        padding_lens: [N] int32, tokens at the end of each context that were never written; those
            get the slot of the last one that was.
    """
    slots = torch.empty(count, dtype=torch.int32, device=block_tables.device)
    _list_slots[len(context_lens), triton.cdiv(max_context_len, _TILE)](
        block_tables, context_lens, starts, padding_lens, slots, block_tables.stride(0),
        BLOCK_SIZE=block_size, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return slots
