"""The steps between sampling and the next drafts, on small tensors of integers.

Verification keeps the target's distribution exactly. Every row is sampled from the target's
processed distribution, as if there were no drafts. A draft is accepted while it equals the sample
of the row before it. The first sample that differs is the correction; after k accepted drafts the
last sample is the bonus token. So the output never depends on the drafts.
"""

from __future__ import annotations

import torch


def verify_drafts(
    sampled: torch.Tensor,
    drafts: torch.Tensor | None,
    table: torch.Tensor | None,
    limits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each sequence samples, and how many of its drafts are accepted.

    Args:
        sampled: [R] int64, a token for each row of logits; -1 where none could be chosen.
        drafts: [S, k] int64, padded with a number that is no token; None without drafts (k = 0).
        table: [S, k + 1] int64, the rows of each sequence, padded by repeating the last; None when
            all have k + 1.
        limits: [S] int64, of how many drafts may be accepted; None where all may.

    Returns:
        [S, k + 1] int64, and [S] int64. Row s of the first starts with so many accepted drafts,
        followed by the correction or bonus token.
    """
    if drafts is None:
        return sampled[:, None], torch.zeros_like(sampled)
    shape = drafts.shape[0], drafts.shape[1] + 1
    token_ids = sampled.view(shape) if table is None else sampled[table]
    matches = (token_ids[:, :-1] == drafts).long()
    accepted = matches.cumprod(dim=1).sum(dim=1)
    return token_ids, accepted if limits is None else accepted.minimum(limits)


def place_samples(
    next_token_ids: torch.Tensor,
    logits_indices: torch.Tensor,
    sampled: torch.Tensor,
    num_accepted: torch.Tensor,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Write sampled tokens behind their rows, in place -> [S] int64: the row of the forward pass
    from which each sequence's newest token was sampled.

    Args:
        next_token_ids: [T] int64, the token after each row. It gets 0 where none could be chosen.
        logits_indices: [R] int64, different rows of the forward pass.
        sampled, table: as for `verify_drafts`.
        num_accepted: [S] int64.
    """
    next_token_ids[logits_indices] = sampled.clamp(min=0)
    if table is not None:
        rows = logits_indices[table]
    elif len(logits_indices) == len(num_accepted):
        return logits_indices
    else:
        rows = logits_indices.view(len(num_accepted), -1)
    return rows.gather(1, num_accepted[:, None])[:, 0]


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
    """The rows from which drafts are made, behind a row of each sequence: a token, and masks.

    Beyond a sequence's blocks or `max_model_len`, rows stay at its last position with slot -1.

    Args:
        token_ids: [S] int64, of the first rows.
        positions: [S] int64.
        block_tables: [S, max_blocks] int32.
        block_counts: [S] int32; valid entries of each row.
        distance: how far the first row is behind its sequence's position.
        num_rows: of each sequence.
        block_size: slots of a block of the cache.

    Returns:
        Token ids, positions and slots [S * num_rows] int64; context lengths [S] int32, the rows
        with slots included (a sequence without blocks has `num_rows`); starts [S + 1] int32.
    """
    count, width = block_tables.shape
    device = positions.device
    limit = (block_counts.long() * block_size).clamp(max=max_model_len)[:, None]
    ahead = torch.arange(num_rows, device=device)
    wanted = positions[:, None] + distance + ahead
    inside = wanted.minimum(limit - 1).clamp(min=0)
    blocks = block_tables.long().gather(1, inside // block_size)
    slots = torch.where(wanted < limit, blocks * block_size + inside % block_size, -1)
    token_ids = torch.where(ahead == 0, token_ids[:, None], mask_token_id)
    nothing = min(num_rows, width * block_size, max_model_len)
    lens = (wanted[:, -1:] + 1).minimum(limit)
    lens = torch.where(limit == 0, nothing, lens)[:, 0].int()
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * num_rows
    return token_ids.flatten(), inside.flatten(), slots.flatten(), lens, starts
