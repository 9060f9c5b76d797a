"""What a step leaves on the device for the next one: its newest tokens, drafts and positions.

A step that is launched ahead begins with tokens that the host does not know yet: the newest token
of a sequence and its drafts, at a position that depends on how many drafts were accepted. They are
written into the step's inputs on the device. Drafts that the host has looked up take the place of
those that the last step left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.batch import ScheduledSequence
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.graphs.staging import StagingBuffer
from atom.kv_cache.block_tables import BlockTables
from atom.model_engine.step.input_buffers import (
    NOTHING_TAKEN,
    CarriedAcceptance,
    CarriedPlan,
    NothingCarried,
    StepInput,
)
from atom.model_ops.kernels.torch import carried as torch_ops
from atom.model_ops.kernels.torch.carried import CarriedInputs, CarriedTokens
from atom.sampling.plan import RowLayout, SamplePlan
from atom.sampling.sampler import Verified
from atom.spec_decode.proposers.base import Proposal

TakeOp = Callable[[CarriedTokens, CarriedInputs, torch.Tensor, int, torch.Tensor, int], None]
LeaveOp = Callable[
    [
        CarriedTokens,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor | None,
    ],
    None,
]


@dataclass(frozen=True)
class _CarriedIndices:
    """Where tokens are taken and left, on the host: the same in each step of the same layout.

    Two sequences of rows 7 and 4 are sampled, and the second one is ahead with drafts d0 d1: the
    forward pass is [a, b, d0, d1], and `left` is [[7, 4], [0, 1]]: each row's newest token is
    that of its first row of the forward pass, and what was accepted behind it. `taken` has a column
    for b, d0 and d1: rows [4, 4, 4] in what was left, places [0, 1, 2] there, rows [1, 2, 3] of the
    forward pass and [1, 2, 3] of the logits, then batch index 1 for b and places [2, 3] in
    `SamplePlan.drafts` (of 2 for each sequence) for its drafts, and 3 queries for each.

    Attributes:
        layout, ahead: what it is made of.
        taken, left: as the ops have them.
    """

    layout: RowLayout
    ahead: np.ndarray
    taken: np.ndarray
    left: np.ndarray

    @classmethod
    def of(
        cls, layout: RowLayout, ahead: np.ndarray, rows: np.ndarray, query_lens: np.ndarray
    ) -> _CarriedIndices:
        """Args:
        ahead: which of the S sampled sequences are.
        rows: [S], the sequences' rows.
        query_lens: [B], rows of each sequence in the forward pass.
        """
        indices = np.array(layout.indices, dtype=np.int64)
        is_ahead = np.zeros(len(indices), dtype=bool)
        is_ahead[ahead] = True
        ahead_rows = np.flatnonzero(is_ahead[layout.owners])
        # The newest tokens of all of them, then the drafts.
        taken = ahead_rows[np.argsort(layout.offsets[ahead_rows] > 0, kind="stable")]
        owners, offsets = layout.owners[taken], layout.offsets[taken]
        places = owners * layout.most + offsets - 1
        columns = (
            rows[owners],
            offsets,
            layout.logits_indices[taken],
            taken,
            np.where(offsets == 0, indices[owners], places),
            query_lens[indices[owners]],
        )
        first = layout.logits_indices[layout.first]
        return cls(layout, ahead, np.stack(columns), np.stack((rows, first)))

    def fit(self, layout: RowLayout, ahead: np.ndarray) -> bool:
        """Whether they are those of a step: a repeated step has its layout itself."""
        return layout is self.layout and np.array_equal(ahead, self.ahead)


class CarriedRows(NothingCarried):
    """The newest token, drafts and position of each row, on the device.

    Args:
        most_drafts: of a sequence.
        take, leave: the ops of these names.
        group: the ranks that take part in each step; the first one's drafts are left on all.
    """

    overlaps = True

    def __init__(
        self,
        num_rows: int,
        most_drafts: int,
        device: torch.device,
        take: TakeOp = torch_ops.take_carried,
        leave: LeaveOp = torch_ops.leave_carried,
        group: ParallelGroup = SINGLE,
    ) -> None:
        self._carried = CarriedTokens(
            torch.zeros(num_rows, 1 + most_drafts, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        # A step accepts from none to all of its drafts.
        self._num_places = 1 + most_drafts
        self._indices: _CarriedIndices | None = None
        self._take = take
        self._leave = leave
        self._group = group

    def put(
        self,
        sequences: Sequence[ScheduledSequence],
        plan: SamplePlan,
        query_lens: Sequence[int],
        staging: StagingBuffer,
    ) -> CarriedPlan:
        layout = plan.layout
        # Of the S sampled sequences, those ahead.
        ahead = np.flatnonzero([sequences[i].is_ahead for i in layout.indices])
        if self._indices is None or not self._indices.fit(layout, ahead):
            rows = np.array([sequences[i].row for i in layout.indices], dtype=np.int64)
            self._indices = _CarriedIndices.of(layout, ahead, rows, np.array(query_lens))
        indices = self._indices
        left = staging.put(indices.left)
        if not len(ahead):
            return CarriedPlan(NOTHING_TAKEN, 0, left)
        taken, acceptance = staging.put(indices.taken), None
        known = self._known(sequences)
        if plan.synthetic is not None:
            starts = np.array([sequences[i].start for i in layout.indices], dtype=np.int64)
            counts = [plan.synthetic.at(starts - less)[ahead] for less in range(self._num_places)]
            parts = ahead, starts[ahead], np.stack(counts)
            acceptance = CarriedAcceptance(*(staging.put(part) for part in parts))
        known_dev = None if known is None else staging.put(known)
        return CarriedPlan(taken, len(ahead), left, known_dev, acceptance)

    def _known(self, sequences: Sequence[ScheduledSequence]) -> np.ndarray | None:
        """Where the host's own drafts belong, and these, as in a `CarriedPlan`."""
        owners = [s for s in sequences if s.knows_drafts and s.num_drafts]
        if not owners:
            return None
        first = [s.row * self._num_places + 1 for s in owners]
        places = [
            start + i for start, s in zip(first, owners, strict=True) for i in range(s.num_drafts)
        ]
        return np.array([places, [t for s in owners for t in s.draft_token_ids]], dtype=np.int64)

    def take(self, step: StepInput, tables: BlockTables, block_size: int) -> None:
        plan, model_input, sample = step.carried, step.model_input, step.sample
        if plan.known is not None:
            self._carried.token_ids.view(-1).index_copy_(0, *plan.known)
        inputs = CarriedInputs(
            model_input.input_ids,
            model_input.positions,
            model_input.attention.slot_mapping,
            model_input.attention.context_lens,
            step.next_token_ids,
            sample.positions,
            sample.drafts,
        )
        self._take(self._carried, inputs, plan.taken, plan.num_newest, tables.on_device, block_size)
        if plan.acceptance is not None:
            assert sample.synthetic is not None
            acceptance = plan.acceptance
            less = acceptance.most - self._carried.positions[plan.taken[0, : plan.num_newest]]
            sample.synthetic.counts[acceptance.which] = acceptance.counts.gather(0, less[None])[0]

    def leave(self, step: StepInput, verified: Verified, proposed: Proposal | None) -> None:
        if not step.carried.left.shape[1]:
            return
        drafts = None if proposed is None else proposed.token_ids
        if drafts is not None and drafts.shape[1]:
            # Ranks agree on tokens, but each has made drafts by itself.
            drafts = self._group.broadcast(drafts.contiguous())
        self._leave(
            self._carried,
            step.carried.left,
            verified.token_ids,
            verified.num_accepted,
            step.model_input.positions,
            drafts,
        )
