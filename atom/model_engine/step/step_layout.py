"""The inputs of a step that decodes, kept for the next step of the same sequences.

Most steps give the same sequences the same numbers of tokens as an earlier one. Only tokens,
positions and places in the KV cache differ then; all else is as it was laid out before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from atom.batch import ScheduledSequence
from atom.graphs.staging import StagingBuffer
from atom.kv_cache.block_tables import BlockTables

if TYPE_CHECKING:
    from atom.model_engine.step.input_builder import StepInput


def layout_of(sequences: Sequence[ScheduledSequence]) -> Hashable | None:
    """What decides the layout of a step of which every row is sampled; None for other steps."""
    layout = []
    for s in sequences:
        if not s.wants_sample or len(s.token_ids) != s.num_drafts + 1:
            return None
        layout.append((s.row, s.num_drafts))
    return tuple(layout)


@dataclass(eq=False)
class StepLayout:
    """A step of which every token is sampled, as it lies in a staging buffer.

    It has T rows for its N tokens; in a graph some are padding. `next_token_ids` stay as they are:
    samples are written behind all rows.

    Attributes:
        step: as it was laid out. Where the host has a say in tokens, its `sample` is laid out again
            in each step.
        rows_dev: the B sequences' rows on the device, padded for a graph.
        words: what the host memory held, without new block ids.
        owners: [N], which of the B sequences a token belongs to.
        rows: [N], that sequence's row in the tables.
        offsets: [N], the token's place among its sequence's.
        where: the row of T of each token: all of them, or [N].
        places: host arrays of what differs in the next step: input ids, positions and slots [T],
            context lengths and block counts [B].
        drafts, sampled_positions, accepted: likewise [S * k], [N] and [S], if the step has them.
        later, draft_places: which of the N tokens are drafts, and their places in `drafts`.
        repeated: the last step, where nothing of it differs but what lies in the buffer.
    """

    step: StepInput
    rows_dev: torch.Tensor
    words: np.ndarray
    owners: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    where: np.ndarray | slice
    places: tuple[np.ndarray, ...]
    drafts: np.ndarray | None
    sampled_positions: np.ndarray | None
    accepted: np.ndarray | None
    later: np.ndarray
    draft_places: np.ndarray
    repeated: StepInput | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[ScheduledSequence],
        step: StepInput,
        rows_dev: torch.Tensor,
        where: np.ndarray,
        staging: StagingBuffer,
        words: np.ndarray,
    ) -> StepLayout | None:
        """None when the staging buffer was full."""
        model_input, sample = step.model_input, step.sample
        attention = model_input.attention
        tensors = (
            *(model_input.input_ids, model_input.positions, attention.slot_mapping),
            *(attention.context_lens, attention.block_counts),
        )
        counts = None if sample.synthetic is None else sample.synthetic.counts
        optional = (sample.drafts, sample.positions, counts)
        places = [staging.host_array(t) for t in tensors]
        optional_arrays = [None if t is None else staging.host_array(t) for t in optional]
        known = [place for place in places if place is not None]
        if len(known) < len(tensors) or any(
            (t is None) != (array is None)
            for t, array in zip(optional, optional_arrays, strict=True)
        ):
            return None
        lens = [len(s.token_ids) for s in sequences]
        owners = np.repeat(np.arange(len(sequences)), lens)
        offsets = np.concatenate([np.arange(n) for n in lens])
        later = np.flatnonzero(offsets)
        return cls(
            step,
            rows_dev,
            words.copy(),
            owners,
            np.repeat([s.row for s in sequences], lens),
            offsets,
            slice(None) if step.graph is None else where,
            tuple(known),
            *(optional_arrays[0], optional_arrays[1], optional_arrays[2]),
            later,
            owners[later] * sample.layout.most + offsets[later] - 1,
        )

    def of_tables(self, block_tables: torch.Tensor, max_context_len: int) -> StepInput:
        """The same step for all with these tables: the lengths of contexts are bounded by them."""
        step = self.repeated
        if step is None or step.model_input.attention.block_tables is not block_tables:
            model_input = self.step.model_input
            attention = replace(
                model_input.attention,
                block_tables=block_tables,
                max_context_len=max_context_len,
                context_lens_cpu=None,
                most_context_cpu=None,
            )
            model_input = replace(model_input, attention=attention)
            step = replace(self.step, model_input=model_input, carried=None, recordings={})
            self.repeated = step
        return step

    def fill(
        self,
        sequences: Sequence[ScheduledSequence],
        context_lens: Sequence[int],
        tables: BlockTables,
        block_size: int,
    ) -> None:
        """Write what differs in a step of the same layout."""
        input_ids, own_positions, slots, contexts, block_counts = self.places
        tokens = np.array([token for s in sequences for token in s.token_ids])
        input_ids[self.where] = tokens
        starts = np.array([s.start for s in sequences])
        positions = starts[self.owners] + self.offsets
        own_positions[self.where] = positions
        slots[self.where] = tables.slots_at(self.rows, positions, block_size)
        contexts[:] = context_lens
        block_counts[:] = [s.num_blocks for s in sequences]
        if self.sampled_positions is not None:
            np.add(positions, 1, out=self.sampled_positions)
        if self.accepted is not None:
            assert self.step.sample.synthetic is not None
            self.accepted[:] = self.step.sample.synthetic.at(starts)
        if self.drafts is not None:
            # What pads them stays.
            self.drafts[self.draft_places] = tokens[self.later]


class StepLayoutCache:
    """The layouts of the sequences that run; forgotten when one of them starts or ends.

    Attributes:
        steps: what is known, by `layout_of`; nothing is by None.
    """

    _MOST = 64

    def __init__(self) -> None:
        self.steps: dict[Hashable, StepLayout] = {}

    def add(self, layout: Hashable, step: StepLayout | None) -> None:
        if step is not None and (layout in self.steps or len(self.steps) < self._MOST):
            self.steps[layout] = step

    def forget(self) -> None:
        self.steps.clear()
