"""Keeps the target's hidden states while it generates, so that training need not recompute them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from atom.graphs.capture import GraphPlan
from atom.kv_cache.base import KVCacheBuilder
from atom.spec_decode.base import NO_LOOKAHEAD, VerifiedStep


class FeatureRecorder:
    """A proposer that proposes nothing and remembers what a drafter would read.

    Prefix caching must be off: rows that are not computed leave no features.
    """

    lookahead = NO_LOOKAHEAD
    draft_model: nn.Module | None = None
    kv_cache_builders: Sequence[KVCacheBuilder] = ()
    reads_steps = True

    def __init__(self, aux_layer_ids: tuple[int, ...]) -> None:
        self.aux_layer_ids = aux_layer_ids
        # By sequence: (position of the first row, rows).
        self._rows: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)

    def capture(self, plan: GraphPlan) -> None:
        """There is nothing to capture."""

    def propose(self, step: VerifiedStep, num_drafts: int) -> torch.Tensor:
        output = step.model_output
        rows = torch.cat((*output.aux_hidden_states, output.hidden_states), dim=-1).cpu()
        lengths = [len(sequence.token_ids) for sequence in step.sequences]
        # Clones, so that no sequence keeps another's rows alive.
        for sequence, own in zip(step.sequences, torch.split(rows, lengths), strict=True):
            self._rows[sequence.id].append((sequence.start, own.clone()))
        return step.next_token_ids.new_empty((len(step.last_rows), 0))

    def take(self, sequence_id: str, num_rows: int) -> torch.Tensor:
        """[num_rows, (A + 1) * hidden] of a finished sequence, which is forgotten.

        Rows computed twice (after a preemption) are taken from the later pass.
        """
        parts = self._rows.pop(sequence_id)
        features = parts[0][1].new_empty((num_rows, parts[0][1].shape[1]))
        for position, rows in parts:
            # A sequence that ends early was scheduled once more than it has tokens.
            rows = rows[: max(num_rows - position, 0)]
            features[position : position + len(rows)] = rows
        return features

    def forget(self, sequence_id: str) -> None:
        self._rows.pop(sequence_id, None)
