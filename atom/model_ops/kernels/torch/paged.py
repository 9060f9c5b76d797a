"""Shared by the torch attention ops: cache writes, gathering blocks, masks, grouping.

On a GPU there is no host sync and no copy to the device if all query lengths are equal and context
lengths are unknown on the host, so a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from atom.model_ops.attention.metadata import AttentionMetadata
from atom.model_ops.kernels.torch.fp8 import bits, dequantise, quantise
from atom.platform import current_platform


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: float32 where the processor has no native bfloat16."""
    widen = x.device.type == "cpu" and not current_platform().has_native_bf16
    return torch.float32 if widen else x.dtype


def by_query_length(
    metadata: AttentionMetadata, device: torch.device
) -> Iterator[tuple[int, list[int], torch.Tensor | None]]:
    """Group sequences by query length: the length, the sequences, their tokens.

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


def write_rows(
    slots: torch.Tensor, *writes: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
) -> None:
    """Write rows [T, ...] to slots [T] of pools [blocks, block_size, ...].

    Slot -1 is skipped on a CPU; elsewhere it is written to the spare block at the pool's end.

    Args:
        writes: (pool, rows, scale of an FP8 pool or None) each.
    """
    on_cpu = slots.device.type == "cpu"
    real = slots >= 0 if on_cpu and bool((slots < 0).any()) else None
    if real is not None:
        slots = slots[real]
    for pool, rows, scale in writes:
        stored = _as_stored(rows if real is None else rows[real], pool.dtype, scale)
        if on_cpu:  # where blocks need not lie side by side
            size = pool.shape[1]
            bits(pool).index_put_((slots // size, slots % size), bits(stored))
        else:
            bits(pool).flatten(0, 1).index_put_((slots,), bits(stored))


def _as_stored(x: torch.Tensor, storage: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    return x.to(storage) if scale is None else quantise(x, scale, storage)


def longest_context(metadata: AttentionMetadata, rows: list[int]) -> int:
    """The longest context of sequences `rows`, or an upper bound."""
    if metadata.context_lens_cpu is None:
        return metadata.max_context_len
    return max(metadata.context_lens_cpu[b] for b in rows)


def gather_blocks(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    metadata: AttentionMetadata,
    rows: list[int],
    longest: int,
    dtype: torch.dtype,
    visible: int | None = None,
) -> torch.Tensor:
    """[blocks, block_size, ...] -> each sequence's first tokens, [b, longest, ...] of `dtype`.

    Entries beyond a context, of its padding, and behind a window are zeroed: they belong to others
    and may be NaN, which a mask would not remove from a product.

    Args:
        scale: of an FP8 cache.
        visible: how many of a context's last tokens are within windows; None for all.
    """
    num_blocks = -(-longest // cache.shape[1])
    tables = _rows(metadata.block_tables[:, :num_blocks], rows)
    stored = bits(cache)[tables].flatten(1, 2)[:, :longest].view(cache.dtype)
    gathered = stored.to(dtype) if scale is None else dequantise(stored, scale, dtype)
    known, padding = metadata.context_lens_cpu, metadata.padding_lens
    is_cut = visible is not None and visible < longest
    if is_cut or known is None or padding is not None or any(known[b] < longest for b in rows):
        places = torch.arange(longest, device=cache.device)
        context_lens = _rows(metadata.context_lens, rows)[:, None]
        before = places < context_lens - visible if visible is not None else None
        if padding is not None:
            context_lens = context_lens - _rows(padding, rows)[:, None]
        hidden = places >= context_lens
        if before is not None:
            hidden |= before
        gathered.masked_fill_(hidden.view(*hidden.shape, *(1,) * (gathered.dim() - 2)), 0.0)
    return gathered


def attention_mask(
    metadata: AttentionMetadata,
    rows: list[int],
    length: int,
    longest: int,
    sliding_window: int | None = None,
    causal: bool = True,
) -> torch.Tensor | None:
    """[b, length, longest] bool, True where a query may attend; None if everywhere.

    The last query of a sequence sits at the last position of its context. Without `causal` a query
    sees the keys after it, too.
    """
    known = metadata.context_lens_cpu
    uniform = known is not None and all(known[b] == longest for b in rows)
    fits = sliding_window is None or longest <= sliding_window
    if uniform and fits and (length == 1 or not causal):
        return None
    context_lens = _rows(metadata.context_lens, rows)
    device = context_lens.device
    last = context_lens[:, None] - length + torch.arange(length, device=device)
    keys = torch.arange(longest, device=device)
    mask = keys <= (last[:, :, None] if causal else last[:, -1:, None])
    if sliding_window is not None:
        mask = mask & (keys > last[:, :, None] - sliding_window)
    return mask


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`values[rows]`; `rows` ascend, so if they are as many as the values they are all."""
    return values if len(rows) == values.shape[0] else values[rows]
