"""Builds a step's device inputs from a scheduled batch, with one host-to-device copy.

Most steps give the same sequences the same numbers of tokens as an earlier one. Only tokens,
positions and places in the KV cache differ then; all else is as it was laid out before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import add

import numpy as np
import torch

from atom.batch import ScheduledBatch, ScheduledSequence
from atom.graphs.capture import GraphKey
from atom.graphs.runner import GraphRunner
from atom.graphs.staging import StagingBuffer
from atom.kv_cache.block_tables import BlockTables, GraphTables, StepTables, StepTablesInPlace
from atom.model_engine.step.input_buffers import (
    NOTHING_CARRIED,
    CarriedPlan,
    GraphInput,
    InputBuffers,
    NothingCarried,
    StepInput,
    StepLayout,
    TakeOp,
)
from atom.model_engine.step.step_images import NO_ROWS, NoImages, RowsOfImages
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES, ModelInput, changed
from atom.model_ops.kernels.torch.gather import take_inputs
from atom.sampling.plan import SamplePlan
from atom.sampling.sampler import Sampler
from atom.sampling_params import Needs

# Staging buffer bytes for each token, for each sequence, and a constant part.
_TOKEN_BYTES, _SEQUENCE_BYTES, _MORE_BYTES = 184, 512, 1 << 16
_MOST_KEPT_STEPS = 64
# (row, number of drafts) of each sequence
_Key = tuple[tuple[int, int], ...]
_NO_KEY: _Key = ()


class _LaidOutStep:
    """A step as it lies in the staging buffer, for all steps of its layout if it is kept.

    Only steps of which every token is sampled are kept. Their `next_token_ids` stay as they are:
    samples are written behind all rows.

    Attributes:
        step: without what differs between these steps. Where it lies in place, the last of them:
            nothing differs but what is in the buffer.
        tables: where the step's block tables come from.
        words: what the host memory held, without new block ids; empty unless the step is kept.
        repeated: the host's arrays of `SamplePlan.repeated`; likewise.
    """

    def __init__(
        self, step: StepInput, layout: StepLayout, buffers: InputBuffers, tables: StepTables
    ) -> None:
        self.step = step
        self.layout = layout
        self.buffers = buffers
        self.tables = tables
        self.words = np.arange(0)
        self.repeated: Sequence[np.ndarray | None] = ()

    def keep(self, staging: StagingBuffer) -> None:
        """Note what is needed to repeat it, before anything else is staged."""
        self.words = staging.words().copy()
        repeated = self.step.sample.repeated
        self.repeated = [None if t is None else staging.host_array(t) for t in repeated]

    def in_place(self, block_tables: torch.Tensor, max_context_len: int) -> StepInput:
        """The same step for all with these tables, which bound the lengths of contexts."""
        model_input = self.step.model_input
        if model_input.attention.block_tables is not block_tables:
            attention = replace(
                model_input.attention, block_tables=block_tables, max_context_len=max_context_len
            )
            model_input = replace(model_input, attention=attention)
            self.step = replace(self.step, model_input=model_input, recordings={})
        return self.step

    def at(
        self,
        sequences: Sequence[ScheduledSequence],
        starts: Sequence[int],
        block_tables: torch.Tensor,
        sample: SamplePlan,
        carried: CarriedPlan,
    ) -> StepInput:
        """The step of these sequences, whose contexts are known unless one is ahead."""
        step, context_lens = self.step, tuple(map(add, starts, self.layout.query_lens))
        attention = changed(
            step.model_input.attention,
            block_tables=block_tables,
            max_context_len=max(context_lens),
            context_lens_cpu=None if any(s.is_ahead for s in sequences) else context_lens,
            most_context_cpu=context_lens,
            _derived={},
        )
        model_input = changed(step.model_input, attention=attention)
        return changed(step, model_input=model_input, sample=sample, carried=carried, recordings={})


def _decode_key(sequences: Sequence[ScheduledSequence]) -> _Key:
    """What decides the layout of a step of which every row is sampled; empty for other steps."""
    key = []
    for s in sequences:
        if not s.wants_sample or len(s.token_ids) != s.num_drafts + 1:
            return ()
        key.append((s.row, s.num_drafts))
    return tuple(key)


class InputBuilder:
    """Writes a batch into a staging buffer and copies it to the device.

    Attributes:
        staging: the staging buffer.
        images: of running sequences.
        carried: what passes from step to step on the device.

    Args:
        tables: of the sequences that run; at least as wide as those of graphs.
        graphs: None if every step runs op by op.
        max_num_tokens: limit of a step.
        drafts: whether to compute `next_token_ids`, which proposers read.
        in_place: whether the inputs of steps with the same shapes are at the same addresses.
        take: the op `take_inputs`, in graphs.
        ragged_len: the longest query of steps whose queries differ in length, at least, so that
            more of them recur.
        selects_rows: whether steps that do not recur may name the rows that are read.
    """

    def __init__(
        self,
        sampler: Sampler,
        tables: BlockTables,
        graphs: GraphRunner | None = None,
        *,
        max_num_tokens: int,
        block_size: int,
        drafts: bool,
        in_place: bool = False,
        carried: NothingCarried | None = None,
        take: TakeOp = take_inputs,
        ragged_len: int = 0,
        selects_rows: bool = False,
        images: NoImages | None = None,
    ) -> None:
        num_rows, device = len(tables.on_device), tables.on_device.device
        most = max(max_num_tokens, num_rows * MAX_DECODE_QUERIES)
        num_bytes = most * _TOKEN_BYTES + num_rows * _SEQUENCE_BYTES + _MORE_BYTES
        self._graphs = graphs
        self._padding_row = num_rows
        self._sampler = sampler
        self._block_size = block_size
        self._drafts = drafts
        self.carried = carried or NothingCarried()
        self._take = take
        self._ragged_len = ragged_len
        self._selects_rows = selects_rows
        self.images = images or NoImages()
        self.staging = StagingBuffer(num_bytes, device, in_place=in_place)
        # Of the sequences that run; forgotten when one of them starts or ends.
        self._kept: dict[Hashable, _LaidOutStep] = {}
        self._tables = tables
        self._no_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self._step_tables = (StepTablesInPlace if in_place else StepTables)(tables)
        size = (0, 0) if graphs is None else (graphs.plan.batch_sizes[-1], graphs.plan.table_width)
        self._graph_tables = GraphTables(tables, *size)

    def graph_input(self, key: GraphKey) -> GraphInput:
        """The inputs to capture a graph on: all padding, at the addresses that replays will use."""
        out = self._graph_tables.on_device[: key.batch_size]
        longest = key.max_context_len
        model_input, buffers = self._padding(out, key.query_len, longest, captured=True)
        return GraphInput(
            model_input,
            buffers.sources_dev,
            buffers.rows_dev,
            buffers.num_drafts_dev,
            buffers.next_token_ids(len(model_input.input_ids)),
            self._tables.on_device[:, : out.shape[1]],
            self._take,
        )

    def padding(self) -> ModelInput:
        """One padding row."""
        row, _ = self._padding(self._no_table, 1, 1, captured=False)
        return replace(row, attention=replace(row.attention, context_lens_cpu=(1,)))

    def _padding(
        self, block_tables: torch.Tensor, query_len: int, max_context_len: int, *, captured: bool
    ) -> tuple[ModelInput, InputBuffers]:
        size = len(block_tables)
        self.staging.restart()
        buffers = self._buffers(size * query_len, size, captured=captured)
        buffers.pad(query_len, np.arange(0), self._padding_row)
        self.staging.send()
        query_lens = (query_len,) * size
        return buffers.model_input(query_lens, query_len, block_tables, max_context_len), buffers

    def _buffers(self, tokens: int, size: int, *, captured: bool) -> InputBuffers:
        drafts, mrope = self._drafts, self.images.mrope
        return InputBuffers(
            self.staging, tokens, size, drafts=drafts, captured=captured, mrope=mrope
        )

    def build(self, batch: ScheduledBatch) -> StepInput:
        """Write all inputs of the step and start their copy to the device."""
        sequences, starts = batch.sequences, [s.start for s in batch.sequences]
        if batch.new or batch.freed_rows:
            self._kept.clear()
        images = self.images.rows(sequences) if self.images.are_running else NO_ROWS
        graph, key = None, _NO_KEY
        if not any(images):
            key = _decode_key(sequences)
            if self._graphs is not None:
                longest_query = max([len(s.token_ids) for s in sequences])
                graph = self._graphs.fit(len(sequences), longest_query, max(starts))
        self._tables.grow(sequences)
        laid_out = self._kept.get((key, graph))
        sample = None if laid_out is None else self._repeat(laid_out, sequences, starts)
        is_repeated = sample is not None
        if laid_out is None or sample is None:
            laid_out = self._lay_out(batch, key, graph, starts, images)
            sample = laid_out.step.sample
        # Last, since their number changes between steps that are otherwise the same.
        self._tables.stage(self.staging)
        carried = self.carried.put(sequences, sample, laid_out.layout.query_lens, self.staging)
        self.staging.send()
        self._tables.update()
        tables = laid_out.tables.select(sequences, laid_out.buffers.rows_dev)
        if is_repeated and laid_out.tables.in_place:
            step = laid_out.in_place(tables, tables.shape[1] * self._block_size)
            return step if step.samples_on_device else changed(step, sample=sample)
        step = laid_out.at(sequences, starts, tables, sample, carried)
        if carried.num_newest:
            self.carried.take(step, self._tables, self._block_size)
        return step

    def _repeat(
        self, laid_out: _LaidOutStep, sequences: Sequence[ScheduledSequence], starts: Sequence[int]
    ) -> SamplePlan | None:
        """Stage what differs in a step of a known layout; None if the host has no say in it any
        more.
        """
        self.staging.repeat(laid_out.words)
        sample: SamplePlan | None = laid_out.step.sample
        if sample is not None and not laid_out.step.samples_on_device:
            sample = self._sampler.lay_out_again(sample, sequences, self.staging)
        if sample is None:
            return None
        first = np.array(starts)
        positions = laid_out.layout.fill(
            laid_out.buffers, sequences, first, self._tables, self._block_size
        )
        drafts, sampled_positions, accepted = laid_out.repeated
        if sampled_positions is not None:
            np.add(positions, 1, out=sampled_positions)
        if accepted is not None:
            assert sample.synthetic is not None
            accepted[:] = sample.synthetic.at(first)
        if drafts is not None:
            # What pads them stays.
            rows = sample.layout
            drafts[rows.draft_places] = laid_out.buffers.input_ids[rows.draft_rows]
        return sample

    def _lay_out(
        self,
        batch: ScheduledBatch,
        key: _Key,
        graph: GraphKey | None,
        starts: Sequence[int],
        images: RowsOfImages,
    ) -> _LaidOutStep:
        """Stage a step anew, and keep it for others of the same key and graph if there may be
        any.
        """
        sequences = batch.sequences
        layout = StepLayout(sequences, graph, self._ragged_len)
        buffers = self._reserve(layout)
        self._put_layout(buffers, sequences, layout)
        layout.fill(buffers, sequences, np.array(starts), self._tables, self._block_size)
        self._put_shifted_input_ids(buffers, sequences, layout)
        ids, positions = buffers.input_ids[: layout.num_rows], buffers.positions[: layout.num_rows]
        sample = self._sampler.lay_out(
            batch, layout.rows, ids, positions, layout.ends, self.staging
        )
        sampled, draft_sampling_rows = self._put_sampled(buffers, layout, sample)
        is_replayable = (
            len(sample.states) == len(sequences)
            and not (any(images) or batch.new)
            and layout.longest_query <= MAX_DECODE_QUERIES
        )
        samples_on_device = is_replayable and sample.samples_on_device
        model_input = buffers.model_input(
            layout.query_lens, layout.longest_query, self._no_table, 0
        )
        selects_rows = self._selects_rows and not (graph or is_replayable or sample.prompts)
        output_rows = sample.logits_indices if selects_rows else None
        own, following = images
        step = StepInput(
            changed(model_input, output_rows=output_rows, images=own, next_images=following),
            graph,
            sample,
            buffers.next_token_ids(layout.num_rows),
            sampled,
            draft_sampling_rows,
            is_decode=bool(key),
            is_replayable=is_replayable,
            samples_on_device=samples_on_device,
            carried=NOTHING_CARRIED,
        )
        tables = self._step_tables if graph is None else self._graph_tables
        laid_out = _LaidOutStep(step, layout, buffers, tables)
        may_repeat = key and is_replayable and not sample.prompts and not self.staging.is_full
        has_room = len(self._kept) < _MOST_KEPT_STEPS or (key, graph) in self._kept
        if may_repeat and has_room and (samples_on_device or tables.in_place):
            laid_out.keep(self.staging)
            self._kept[key, graph] = laid_out
        return laid_out

    def _reserve(self, layout: StepLayout) -> InputBuffers:
        """Where the step's inputs go, from the start of the staging buffer on."""
        self.staging.restart()
        buffers = self._buffers(*layout.buffer_size, captured=layout.is_captured)
        if layout.is_captured:
            buffers.pad(layout.longest_query, layout.token_rows, self._padding_row)
        return buffers

    def _put_sampled(
        self, buffers: InputBuffers, layout: StepLayout, sample: SamplePlan
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`sampled` and `draft_sampling_rows` of a `StepInput`."""
        indices = sample.layout.indices
        is_sampled = self._drafts and bool(sample.needs & Needs.TEMPERATURE)
        if len(indices) == layout.num_sequences:
            return None, buffers.rows_dev[: layout.num_sequences] if is_sampled else None
        sampled = self.staging.put(np.array(indices, dtype=np.int64))
        return sampled, self.staging.put(layout.rows[indices]) if is_sampled else None

    def _put_layout(
        self, buffers: InputBuffers, sequences: Sequence[ScheduledSequence], layout: StepLayout
    ) -> None:
        """Write what all steps of the layout have in common."""
        count = layout.num_sequences
        buffers.rows[:count] = buffers.state_rows[:count] = layout.rows
        if layout.is_captured:
            buffers.num_drafts[:count] = [s.num_drafts for s in sequences]
            buffers.padding[:count] = [layout.longest_query - len(s.token_ids) for s in sequences]
        if self.images.mrope:
            shifts = self.images.mrope_shifts(sequences)
            # What pads behind the last token is a copy of it.
            buffers.shifts[:] = shifts[-1]
            buffers.shifts[layout.token_rows] = shifts
        buffers.starts[0] = 0
        buffers.starts[1 : count + 1] = np.cumsum(layout.query_lens)

    def _put_shifted_input_ids(
        self, buffers: InputBuffers, sequences: Sequence[ScheduledSequence], layout: StepLayout
    ) -> None:
        """The token after each row, which a draft that reads hidden states takes beside it: for
        rows [p0, p1, a, b0, c], where p2 is the next token of the prompt and b0 a draft,
        [p1, p2, -, -, -]. What is sampled behind a, b0 and c is written once it is known.
        """
        if not self._drafts:
            return
        after = np.roll(buffers.input_ids[: layout.num_rows], -1)
        middle = [i for i, s in enumerate(sequences) if s.successor_token is not None]
        if middle:
            after[layout.ends[middle] - 1] = [sequences[i].successor_token for i in middle]
        buffers.successors[: layout.num_rows] = after
