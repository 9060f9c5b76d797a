"""In which rounds `mla_prefill` expands the contexts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atom.model_ops.metadata import AttentionMetadata
from atom.model_ops.upload import upload

PIECE_FIELDS = 4


def plan_rounds(contexts: Sequence[int], room: int) -> list[list[tuple[int, int, int, int]]]:
    """Split contexts into rounds of at most `room` tokens: lists of (sequence, first key, end,
    row).

    A sequence has at most one piece per round, in ascending order; `row` is the position of the
    piece's first key in the round.
    """
    rounds: list[list[tuple[int, int, int, int]]] = [[]]
    row = 0
    for sequence, context in enumerate(contexts):
        first = 0
        while first < context:
            if row == room:
                rounds.append([])
                row = 0
            end = min(context, first + room - row)
            rounds[-1].append((sequence, first, end, row))
            row += end - first
            first = end
    return rounds


@dataclass(frozen=True)
class Round:
    """Attributes:
    pieces: [P, 4] int32, as `plan_rounds` has them.
    used: tokens of all pieces.
    longest: tokens of the longest.
    """

    pieces: torch.Tensor
    used: int
    longest: int


def expansion_rounds(metadata: AttentionMetadata, room: int) -> list[Round]:
    """The rounds of at most `room` tokens, in one copy to the device."""
    contexts = metadata.context_lens_cpu
    if contexts is None:
        contexts = (metadata.max_context_len,) * len(metadata.query_lens_cpu)
    plan = plan_rounds(contexts, room)
    flat = torch.tensor([piece for pieces in plan for piece in pieces], dtype=torch.int32)
    there = upload(flat, metadata.block_tables.device)
    parts = torch.split_with_sizes(there, [len(pieces) for pieces in plan])
    lens = [[end - first for _, first, end, _ in pieces] for pieces in plan]
    return [Round(part, sum(own), max(own)) for part, own in zip(parts, lens, strict=True)]
