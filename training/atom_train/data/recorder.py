"""Records the target's hidden states during generation, so that training need not recompute
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from atom.batch import NO_LOOKAHEAD
from atom.kv_cache.base import KVCacheBuilder
from atom.spec_decode.proposers.base import Proposal, VerifiedStep


class FeatureRecorder:
    """A proposer that makes no drafts and records what a draft would read.

    Prefix caching must be off, since cached tokens are not computed.
    """

    lookahead = NO_LOOKAHEAD
    draft_model: nn.Module | None = None
    kv_cache_builders: Sequence[KVCacheBuilder] = ()
    reads_steps = True
    reads_hidden_states = True
    reads_images = False

    def __init__(self, aux_layer_ids: tuple[int, ...]) -> None:
        self.aux_layer_ids = aux_layer_ids
        # Sequence id -> (position of the first row, rows).
        self._rows: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        output = step.model_output
        rows = torch.cat((*output.aux_hidden_states, output.hidden_states), dim=-1).cpu()
        lengths = [len(sequence.token_ids) for sequence in step.sequences]
        # Cloned, so that a sequence does not keep the rows of others alive.
        for sequence, own in zip(step.sequences, torch.split(rows, lengths), strict=True):
            self._rows[sequence.id].append((sequence.start, own.clone()))
        return Proposal.empty(step)

    def take(self, sequence_id: str, num_rows: int) -> torch.Tensor:
        """[num_rows, (A + 1) * hidden] of a finished sequence, which is then removed.

        Rows computed twice (after a preemption) are taken from the later pass.
        """
        parts = self._rows.pop(sequence_id)
        features = parts[0][1].new_empty((num_rows, parts[0][1].shape[1]))
        is_known = torch.zeros(num_rows, dtype=torch.bool)
        for position, rows in parts:
            # A sequence that ends early was scheduled for more rows than it has tokens.
            rows = rows[: max(num_rows - position, 0)]
            features[position : position + len(rows)] = rows
            is_known[position : position + len(rows)] = True
        assert is_known.all(), f"rows of {sequence_id} were computed and not recorded"
        return features

    def forget(self, sequence_id: str) -> None:
        self._rows.pop(sequence_id, None)
