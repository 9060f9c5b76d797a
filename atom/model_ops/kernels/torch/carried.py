"""What a step leaves on the device for the next one, which is launched before the host reads it.

Each row has its newest token with the drafts that follow it, and the position of that token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CarriedTokens:
    """Attributes:
    token_ids: [rows, 1 + k] int64: the newest token, then its drafts.
    positions: [rows] int64, of the newest token.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class CarriedInputs:
    """The inputs of a step, which get what the step before it left.

    Attributes:
        input_ids, positions, slots: [T] int64.
        context_lens: [B] int32.
        next_token_ids: [T] int64, the token after each row; None without a proposer that reads it.
        sampled_positions: [R] int64, of the tokens to sample; None when every row is greedy.
        drafts: [S, k] int64; None without drafts.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor
    next_token_ids: torch.Tensor | None
    sampled_positions: torch.Tensor | None
    drafts: torch.Tensor | None


def take_carried(
    carried: CarriedTokens,
    inputs: CarriedInputs,
    places: torch.Tensor,
    num_newest: int,
    block_tables: torch.Tensor,
    block_size: int,
) -> None:
    """Write the tokens that the last step left, and all that follows from their positions.

    Args:
        places: [6, A] int64, of A tokens: the row; the token's place in `carried.token_ids`, its
            place in T, and in R; of a newest token its sequence's place in B, of a draft its place
            in `drafts`, flattened; and the number of rows of its sequence in this step.
        num_newest: so many newest tokens come first, then drafts.
        block_tables: [rows, width] int32.
    """
    rows, offsets, tokens, samples, targets, counts = places.unbind(0)
    starts = carried.positions[rows]
    positions = starts + offsets
    token_ids = carried.token_ids[rows, offsets]
    blocks = block_tables[rows, positions // block_size].long()
    inputs.input_ids[tokens] = token_ids
    inputs.positions[tokens] = positions
    inputs.slots[tokens] = blocks * block_size + positions % block_size
    newest, later = slice(num_newest), slice(num_newest, None)
    inputs.context_lens[targets[newest]] = (starts + counts)[newest].int()
    if inputs.sampled_positions is not None:
        inputs.sampled_positions[samples] = positions + 1
    if inputs.next_token_ids is not None:
        inputs.next_token_ids[tokens[later] - 1] = token_ids[later]
    if inputs.drafts is not None:
        inputs.drafts.view(-1)[targets[later]] = token_ids[later]


def leave_carried(
    carried: CarriedTokens,
    places: torch.Tensor,
    token_ids: torch.Tensor,
    num_accepted: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor | None,
) -> None:
    """Leave what S sequences sampled, and the drafts that follow, for the next step.

    Args:
        places: [2, S] int64: the row, and the place in T of its first sample.
        token_ids: [S, k + 1] int64; of each, the newest is behind the `num_accepted` [S] int64
            accepted drafts. -1 where none could be chosen, for which there is 0.
        positions: [T] int64, of the forward pass.
        drafts: [S, n] int64; None when none were made.
    """
    rows, first = places.unbind(0)
    newest = token_ids.gather(1, num_accepted[:, None])[:, 0]
    carried.token_ids[rows, 0] = newest.clamp(min=0)
    carried.positions[rows] = positions[first] + num_accepted + 1
    if drafts is not None:
        carried.token_ids[rows, 1 : 1 + drafts.shape[1]] = drafts
