"""What each row's last step leaves on the device for the next one.

A step that is launched ahead begins with tokens that the host does not know yet: the newest token
of a sequence and its drafts, at a position that depends on how many drafts were accepted. They are
written into the step's inputs on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.batch import ScheduledSequence
from atom.graphs.staging import StagingBuffer
from atom.kv_cache.block_tables import BlockTables
from atom.model_ops.kernels.torch import carried as torch_ops
from atom.model_ops.kernels.torch.carried import CarriedInputs, CarriedTokens
from atom.model_ops.metadata import ModelInput
from atom.model_ops.registry import OpTable
from atom.sampling.plan import SamplePlan
from atom.sampling.sampler import Verified

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
class CarriedPlan:
    """Which rows of a step take what was left, and which leave something; valid after the send.

    Attributes:
        taken, num_newest: as the op `take_carried` has them; None if no sequence is ahead.
        left: as the op `leave_carried` has it.
    """

    taken: torch.Tensor | None
    num_newest: int
    left: torch.Tensor


class CarriedRows:
    """The newest token, drafts and position of each row, on the device.

    Args:
        most_drafts: of a sequence.
        take, leave: the ops of these names.
    """

    def __init__(
        self,
        num_rows: int,
        most_drafts: int,
        device: torch.device,
        take: TakeOp = torch_ops.take_carried,
        leave: LeaveOp = torch_ops.leave_carried,
    ) -> None:
        self._carried = CarriedTokens(
            torch.zeros(num_rows, 1 + most_drafts, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
        self._take = take
        self._leave = leave

    @classmethod
    def create(
        cls, num_rows: int, most_drafts: int, device: torch.device, ops: OpTable
    ) -> CarriedRows:
        """With the platform's ops."""
        take = ops.resolve("take_carried", torch.float32)
        leave = ops.resolve("leave_carried", torch.float32)
        return cls(num_rows, most_drafts, device, take, leave)

    def put(
        self,
        sequences: Sequence[ScheduledSequence],
        plan: SamplePlan,
        query_lens: Sequence[int],
        staging: StagingBuffer,
    ) -> CarriedPlan:
        """Stage which rows take and leave something; the step's own inputs are staged already.

        Args:
            query_lens: [B], rows of each sequence in the forward pass.
        """
        layout = plan.layout
        rows = np.array([sequences[i].row for i in layout.indices], dtype=np.int64)
        first = layout.logits_indices[layout.first]
        left = staging.put(np.stack((rows, first)))
        # Of the S sampled sequences, those ahead.
        ahead = np.array([s for s, i in enumerate(layout.indices) if sequences[i].is_ahead])
        if not len(ahead):
            return CarriedPlan(None, 0, left)
        num_drafts = layout.num_drafts[ahead]
        # The newest tokens of all of them, then the drafts.
        owners = np.concatenate(
            (np.arange(len(ahead)), np.repeat(np.arange(len(ahead)), num_drafts))
        )
        own = ahead[owners]
        begins = np.cumsum(num_drafts) - num_drafts
        later = np.arange(num_drafts.sum()) - np.repeat(begins, num_drafts)
        offsets = np.concatenate((np.zeros(len(ahead), dtype=np.int64), later + 1))
        indices = np.array(layout.indices)[ahead]
        targets = np.concatenate((indices, ahead[owners[len(ahead) :]] * layout.most + later))
        columns = (
            rows[own],
            offsets,
            first[own] + offsets,
            layout.first[own] + offsets,
            targets,
            np.array(query_lens)[indices][owners],
        )
        return CarriedPlan(staging.put(np.stack(columns)), len(ahead), left)

    def take(
        self,
        plan: CarriedPlan,
        model_input: ModelInput,
        sample: SamplePlan,
        next_token_ids: torch.Tensor | None,
        tables: BlockTables,
        block_size: int,
    ) -> None:
        """Write into the inputs of a step what the last one left."""
        if plan.taken is None:
            return
        inputs = CarriedInputs(
            model_input.input_ids,
            model_input.positions,
            model_input.attention.slot_mapping,
            model_input.attention.context_lens,
            next_token_ids,
            sample.positions,
            sample.drafts,
        )
        self._take(self._carried, inputs, plan.taken, plan.num_newest, tables.on_device, block_size)

    def leave(
        self,
        plan: CarriedPlan,
        verified: Verified,
        model_input: ModelInput,
        drafts: torch.Tensor | None,
    ) -> None:
        """Leave a step's tokens and drafts for the next one."""
        if not plan.left.shape[1]:
            return
        self._leave(
            self._carried,
            plan.left,
            verified.token_ids,
            verified.num_accepted,
            model_input.positions,
            drafts,
        )
