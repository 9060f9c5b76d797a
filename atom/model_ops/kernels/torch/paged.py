"""What the attention kinds of plain torch share: gathering blocks, masks, grouping."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from atom.model_ops.metadata import AttentionMetadata
from atom.platform import current_platform


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The type to multiply in: processors without bfloat16 products do it in scalar code."""
    widen = x.device.type == "cpu" and not current_platform().has_native_bf16
    return torch.float32 if widen else x.dtype


def by_query_length(
    metadata: AttentionMetadata, device: torch.device
) -> Iterator[tuple[int, list[int], torch.Tensor | None]]:
    """Sequences with equally many queries, together: their length, which they are, their tokens.

    The tokens are an index [b * length]; None when the group is the whole batch.
    """
    lens = metadata.query_lens_cpu
    if len(set(lens)) == 1:
        yield lens[0], list(range(len(lens))), None
        return
    starts = [0, *accumulate(lens)]
    for length in sorted(set(lens)):
        rows = [b for b, n in enumerate(lens) if n == length]
        tokens = [starts[b] + i for b in rows for i in range(length)]
        yield length, rows, torch.tensor(tokens, device=device)


def gather_blocks(
    cache: torch.Tensor, metadata: AttentionMetadata, rows: list[int], longest: int
) -> torch.Tensor:
    """[blocks, block_size, ...] -> each sequence's first tokens, [b, longest, ...]."""
    num_blocks = -(-longest // cache.shape[1])
    tables = metadata.block_tables[:, :num_blocks]
    if len(rows) != tables.shape[0]:
        tables = tables[rows]
    return cache[tables].flatten(1, 2)[:, :longest]


def causal_mask(
    metadata: AttentionMetadata,
    rows: list[int],
    length: int,
    longest: int,
    sliding_window: int | None = None,
) -> torch.Tensor | None:
    """[b, length, longest] bool, True where a query may look; None when all may look everywhere.

    The last query of a sequence sits at the last position of its context.
    """
    uniform = all(metadata.context_lens_cpu[b] == longest for b in rows)
    if uniform and length == 1 and (sliding_window is None or longest <= sliding_window):
        return None
    context_lens = metadata.context_lens[rows]
    device = context_lens.device
    last = context_lens[:, None] - length + torch.arange(length, device=device)
    keys = torch.arange(longest, device=device)
    mask = keys <= last[:, :, None]
    if sliding_window is not None:
        mask &= keys > last[:, :, None] - sliding_window
    return mask
