"""Paged attention in plain torch: gathers each sequence's blocks, then `F.sdpa`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from atom.model_ops.metadata import AttentionMetadata, KVCacheTensor
from atom.platform import current_platform

PagedAttentionOp = Callable[
    [torch.Tensor, KVCacheTensor, AttentionMetadata, float, "int | None"], torch.Tensor
]


def kv_cache_write(
    k: torch.Tensor, v: torch.Tensor, kv_cache: KVCacheTensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [T, kv_heads, d] to their slots; slot -1 writes nothing."""
    if bool((slot_mapping < 0).any()):
        real = slot_mapping >= 0
        k, v, slot_mapping = k[real], v[real], slot_mapping[real]
    kv_cache.key.flatten(0, 1).index_copy_(0, slot_mapping, k.to(kv_cache.key.dtype))
    kv_cache.value.flatten(0, 1).index_copy_(0, slot_mapping, v.to(kv_cache.value.dtype))


def load() -> PagedAttentionOp:
    return paged_attention


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, d] over the paged cache -> [T, heads, d].

    The last query of a sequence sits at the last position of its context.
    """
    lens = metadata.query_lens_cpu
    if len(set(lens)) == 1:
        everyone = list(range(len(lens)))
        batch = q.view(len(lens), lens[0], *q.shape[1:])
        return _attend(batch, kv_cache, metadata, everyone, scale, sliding_window).flatten(0, 1)
    out = torch.empty_like(q)
    starts = [0]
    for n in lens:
        starts.append(starts[-1] + n)
    for length in sorted(set(lens)):
        rows = [b for b, n in enumerate(lens) if n == length]
        index = torch.tensor([starts[b] + i for b in rows for i in range(length)], device=q.device)
        batch = q[index].view(len(rows), length, *q.shape[1:])
        out[index] = _attend(batch, kv_cache, metadata, rows, scale, sliding_window).flatten(0, 1)
    return out


def _attend(
    q: torch.Tensor,
    kv_cache: KVCacheTensor,
    metadata: AttentionMetadata,
    rows: list[int],
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """q [b, L, heads, d] of sequences `rows`, all with L queries."""
    num_seqs, length, heads, head_dim = q.shape
    kv_heads = kv_cache.key.shape[2]
    group = heads // kv_heads
    longest = max(metadata.context_lens_cpu[b] for b in rows)
    num_blocks = -(-longest // kv_cache.block_size)
    tables = metadata.block_tables[:, :num_blocks]
    if num_seqs != tables.shape[0]:
        tables = tables[rows]
    key = _gather(kv_cache.key, tables, longest, q.dtype)
    value = _gather(kv_cache.value, tables, longest, q.dtype)
    # The query heads of one KV head become extra queries, so that K and V are never repeated.
    grouped = q.view(num_seqs, length, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_seqs, kv_heads, group * length, head_dim).to(key.dtype)
    mask = _mask(metadata, rows, length, longest, sliding_window)
    if mask is not None:
        mask = mask[:, None, None].expand(num_seqs, 1, group, length, longest)
        mask = mask.reshape(num_seqs, 1, group * length, longest)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    out = out.view(num_seqs, kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_seqs, length, heads, head_dim).to(q.dtype)


def _gather(
    cache: torch.Tensor, tables: torch.Tensor, longest: int, dtype: torch.dtype
) -> torch.Tensor:
    """[blocks, block_size, kv_heads, d] -> [b, kv_heads, longest, d]."""
    picked = cache[tables].flatten(1, 2)[:, :longest].transpose(1, 2)
    # Processors without bfloat16 products multiply it in scalar code.
    widen = cache.device.type == "cpu" and not current_platform().has_native_bf16
    return picked.to(torch.float32 if widen else dtype)


def _mask(
    metadata: AttentionMetadata,
    rows: list[int],
    length: int,
    longest: int,
    sliding_window: int | None,
) -> torch.Tensor | None:
    """[b, L, longest] bool, True where a query may look; None when all may look everywhere."""
    context_lens = metadata.context_lens[rows]
    uniform = all(metadata.context_lens_cpu[b] == longest for b in rows)
    if uniform and length == 1 and (sliding_window is None or longest <= sliding_window):
        return None
    device = context_lens.device
    last = context_lens[:, None] - length + torch.arange(length, device=device)
    keys = torch.arange(longest, device=device)
    mask = keys <= last[:, :, None]
    if sliding_window is not None:
        mask &= keys > last[:, :, None] - sliding_window
    return mask
