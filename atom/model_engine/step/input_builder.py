"""Builds a step's device inputs from a scheduled batch, with one host-to-device copy."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import numpy as np
import torch

from atom.batch import ScheduledBatch, ScheduledSequence
from atom.graphs.capture import Bucket
from atom.graphs.recorded import Recording
from atom.graphs.runner import FitOp, GraphKey
from atom.graphs.staging import StagingBuffer
from atom.kv_cache.block_tables import BlockTables, GraphTables, StepTables, StepTablesInPlace
from atom.model_engine.step.input_buffers import BatchShape, GraphInput, InputBuffers, TakeOp
from atom.model_engine.step.next_step import (
    CarriedPlan,
    NothingCarried,
    StepLayout,
    StepLayoutCache,
    layout_of,
)
from atom.model_engine.step.step_images import NO_ROWS, NoImages, RowsOfImages
from atom.model_ops.attention.metadata import (
    MAX_DECODE_QUERIES,
    AttentionMetadata,
    ModelInput,
    changed,
)
from atom.model_ops.kernels.torch.gather import take_inputs
from atom.sampling.plan import SamplePlan
from atom.sampling.sampler import Sampler
from atom.sampling_params import Needs

# Staging buffer bytes for each token, for each sequence, and a constant part.
_TOKEN_BYTES, _SEQUENCE_BYTES, _MORE_BYTES = 184, 512, 1 << 16


@dataclass(frozen=True, eq=False)
class StepInput:
    """The device inputs of one step.

    Attributes:
        model_input: T tokens of B sequences.
        graph: the graph to replay; None to run eagerly.
        sample: which rows are sampled, and how.
        next_token_ids: [T] int64, the known token after each row; undefined for sampled rows. None
            without a proposer that reads steps.
        sampled: [S] int64, batch indices of the sampled sequences; None when all are sampled.
        draft_sampling_rows: [S] int64, the sampled sequences' rows; None when all are greedy, or
            without a proposer that reads steps.
        is_decode: whether each sequence has its last known token, even of its prompt, and its
            drafts, and no others.
        is_replayable: whether other steps have the same shapes, as steps that decode do, and all
            that the model's layers read and that differs between them is in tensors.
        samples_on_device: whether that holds for the choice of tokens, too.
        carried: what passes from step to step on the device.
        recordings: of work on these inputs.
    """

    model_input: ModelInput
    graph: GraphKey | None
    sample: SamplePlan
    next_token_ids: torch.Tensor | None
    sampled: torch.Tensor | None
    draft_sampling_rows: torch.Tensor | None
    is_decode: bool
    is_replayable: bool
    samples_on_device: bool
    carried: CarriedPlan
    recordings: dict[Hashable, Recording[Any]] = field(default_factory=dict, repr=False)


class InputBuilder:
    """Writes a batch into a staging buffer and copies it to the device.

    Attributes:
        staging: the staging buffer.
        images: of running sequences.
        carried: what passes from step to step on the device.

    Args:
        fit: chooses the graph for a batch.
        tables: of the sequences that run.
        graph_tables: shape of the largest graph's block tables; (0, 0) if every step runs eagerly.
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
        fit: FitOp,
        sampler: Sampler,
        tables: BlockTables,
        graph_tables: tuple[int, int] = (0, 0),
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
        self._fit = fit
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
        self._kept = StepLayoutCache()
        self._tables = tables
        self._no_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self._step_tables = (StepTablesInPlace if in_place else StepTables)(tables)
        self._graph_tables = GraphTables(tables, *graph_tables)

    def graph_input(self, bucket: Bucket, query_len: int) -> GraphInput:
        """The inputs to capture a graph on: all padding, at the addresses that replays will use."""
        out = self._graph_tables.on_device[: bucket.batch_size]
        model_input, buffers = self._padding(out, query_len, bucket.max_context_len, captured=True)
        tables = self._tables.on_device[:, : out.shape[1]]
        return GraphInput(
            model_input,
            buffers.sources_dev,
            buffers.rows_dev,
            buffers.num_drafts_dev,
            buffers.successors_dev if self._drafts else None,
            tables,
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
        tokens = size * query_len
        buffers = self._buffers(tokens, size, captured=captured)
        buffers.pad(query_len, np.arange(0), self._padding_row)
        self.staging.send()
        model_input = ModelInput(
            buffers.input_ids_dev,
            buffers.positions_dev,
            AttentionMetadata(
                slot_mapping=buffers.slots_dev,
                block_tables=block_tables,
                block_counts=buffers.block_counts_dev,
                context_lens=buffers.context_lens_dev,
                cu_seqlens_q=buffers.starts_dev,
                max_seqlen_q=query_len,
                max_context_len=max_context_len,
                query_lens_cpu=(query_len,) * size,
                context_lens_cpu=None,
                padding_lens=buffers.padding_dev if captured and query_len > 1 else None,
                state_rows=buffers.state_rows_dev,
            ),
            mrope_shifts=buffers.shifts_dev if self.images.mrope else None,
        )
        return model_input, buffers

    def _buffers(self, tokens: int, size: int, *, captured: bool) -> InputBuffers:
        drafts, mrope = self._drafts, self.images.mrope
        return InputBuffers(
            self.staging, tokens, size, drafts=drafts, captured=captured, mrope=mrope
        )

    def build(self, batch: ScheduledBatch) -> StepInput:
        """Write all inputs of the step and start their copy to the device."""
        if batch.new or batch.freed_rows:
            self._kept.forget()
        images = self.images.rows(batch.sequences) if self.images.are_running else NO_ROWS
        layout = () if any(images) else layout_of(batch.sequences)
        return self._repeat(layout, batch.sequences) or self._lay_out(batch, layout, images)

    def _lay_out(self, batch: ScheduledBatch, layout: Hashable, images: RowsOfImages) -> StepInput:
        """A step that is laid out anew, and kept for others of the same `layout` if there may be
        any.
        """
        sequences = batch.sequences
        fit = runs_op_by_op if any(images) else self._fit
        shape = BatchShape(sequences, fit, self._ragged_len)
        buffers = self._reserve(shape)
        self._tables.grow(sequences)
        self._fill(buffers, sequences, shape)
        next_token_ids = self._put_shifted_input_ids(buffers, sequences, shape)
        token_ids = buffers.input_ids[: shape.num_rows]
        positions = buffers.positions[: shape.num_rows]
        sample = self._sampler.lay_out(
            batch, shape.rows, token_ids, positions, shape.ends, self.staging
        )
        sampled, draft_sampling_rows = self._put_sampled(buffers, shape, sample)
        is_replayable = (
            len(sample.states) == len(sequences)
            and not (any(images) or batch.new)
            and shape.longest_query <= MAX_DECODE_QUERIES
        )
        samples_on_device = is_replayable and sample.samples_on_device
        words = self.staging.words()
        # Last, since their number changes between steps that are otherwise the same.
        carried = self._send(sequences, sample, shape.lens)
        output_rows = None
        if self._selects_rows and not (shape.is_captured or is_replayable or sample.prompts):
            output_rows = sample.logits_indices
        tables = self._graph_tables if shape.is_captured else self._step_tables
        step = StepInput(
            self._model_input(buffers, sequences, shape, tables, images, output_rows),
            shape.graph,
            sample,
            next_token_ids,
            sampled,
            draft_sampling_rows,
            is_decode=bool(layout),
            is_replayable=is_replayable,
            samples_on_device=samples_on_device,
            carried=carried,
        )
        if carried.num_newest:
            self.carried.take(step, self._tables, self._block_size)
        may_repeat = layout and is_replayable and not sample.prompts
        if may_repeat and (samples_on_device or self._step_tables.in_place):
            rows_dev, where = buffers.rows_dev, shape.token_rows
            kept = StepLayout.of(sequences, step, tables, rows_dev, where, self.staging, words)
            self._kept.add(layout, kept)
        return step

    def _repeat(self, layout: Hashable, sequences: Sequence[ScheduledSequence]) -> StepInput | None:
        """A step of a known layout; None if it is not known, needs another graph, or the host has
        no say in it any more.
        """
        kept = self._kept.steps.get(layout)
        if kept is None:
            return None
        laid_out = kept.step
        attention = laid_out.model_input.attention
        starts = [s.start for s in sequences]
        longest_query = max(len(s.token_ids) for s in sequences)
        if self._fit(len(sequences), longest_query, max(starts)) != laid_out.graph:
            return None
        context_lens = tuple(map(add, starts, attention.query_lens_cpu))
        self.staging.repeat(kept.words)
        sample = laid_out.sample
        if not laid_out.samples_on_device:
            now = self._sampler.lay_out_again(sample, sequences, self.staging)
            if now is None:
                return None
            sample = now
        self._tables.grow(sequences)
        kept.fill(sequences, context_lens, self._tables, self._block_size)
        carried = self._send(sequences, sample, attention.query_lens_cpu)
        tables = kept.tables.select(sequences, kept.rows_dev)
        if kept.tables.in_place:
            step = kept.of_tables(tables, tables.shape[1] * self._block_size)
            return step if laid_out.samples_on_device else changed(step, sample=sample)
        attention = changed(
            attention,
            block_tables=tables,
            max_context_len=max(context_lens),
            context_lens_cpu=None if carried.num_newest else context_lens,
            most_context_cpu=context_lens,
            _derived={},
        )
        step = changed(
            laid_out,
            model_input=changed(laid_out.model_input, attention=attention),
            sample=sample,
            carried=carried,
            recordings={},
        )
        if carried.num_newest:
            self.carried.take(step, self._tables, self._block_size)
        return step

    def _send(
        self, sequences: Sequence[ScheduledSequence], sample: SamplePlan, query_lens: Sequence[int]
    ) -> CarriedPlan:
        self._tables.stage(self.staging)
        carried = self.carried.put(sequences, sample, query_lens, self.staging)
        self.staging.send()
        self._tables.update()
        return carried

    def _reserve(self, shape: BatchShape) -> InputBuffers:
        """Where the step's inputs go, from the start of the staging buffer on."""
        self.staging.restart()
        buffers = self._buffers(*shape.buffer_size, captured=shape.is_captured)
        if shape.is_captured:
            buffers.pad(shape.longest_query, shape.token_rows, self._padding_row)
        return buffers

    def _put_sampled(
        self, buffers: InputBuffers, shape: BatchShape, sample: SamplePlan
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`sampled` and `draft_sampling_rows` of a `StepInput`."""
        indices = sample.layout.indices
        is_sampled = self._drafts and bool(sample.needs & Needs.TEMPERATURE)
        if len(indices) == shape.num_sequences:
            return None, buffers.rows_dev[: shape.num_sequences] if is_sampled else None
        sampled = self.staging.put(np.array(indices, dtype=np.int64))
        return sampled, self.staging.put(shape.rows[indices]) if is_sampled else None

    def _fill(
        self, buffers: InputBuffers, sequences: Sequence[ScheduledSequence], shape: BatchShape
    ) -> None:
        count, size, token_rows = shape.num_sequences, self._block_size, shape.token_rows
        buffers.input_ids[token_rows] = [token for s in sequences for token in s.token_ids]
        buffers.positions[token_rows] = shape.positions
        buffers.slots[token_rows] = self._tables.slots_at(shape.owners, shape.positions, size)
        buffers.rows[:count] = buffers.state_rows[:count] = shape.rows
        buffers.context_lens[:count] = shape.context_lens
        buffers.block_counts[:count] = [s.num_blocks for s in sequences]
        if shape.is_captured:
            buffers.num_drafts[:count] = [s.num_drafts for s in sequences]
            buffers.padding[:count] = [shape.longest_query - len(s.token_ids) for s in sequences]
        if self.images.mrope:
            shifts = self.images.mrope_shifts(sequences)
            # What pads behind the last token is a copy of it.
            buffers.shifts[:] = shifts[-1]
            buffers.shifts[token_rows] = shifts
        buffers.starts[0] = 0
        buffers.starts[1 : count + 1] = np.cumsum(shape.lens)

    def _put_shifted_input_ids(
        self, buffers: InputBuffers, sequences: Sequence[ScheduledSequence], shape: BatchShape
    ) -> torch.Tensor | None:
        """The token after each row, which a draft that reads hidden states takes beside it: for
        rows [p0, p1, a, b0, c], where p2 is the next token of the prompt and b0 a draft,
        [p1, p2, -, -, -]. What is sampled behind a, b0 and c is written once it is known.
        """
        if not self._drafts:
            return None
        after = np.roll(buffers.input_ids[: shape.num_rows], -1)
        middle = [i for i, s in enumerate(sequences) if s.successor_token is not None]
        if middle:
            after[shape.ends[middle] - 1] = [sequences[i].successor_token for i in middle]
        buffers.successors[: shape.num_rows] = after
        return buffers.successors_dev[: shape.num_rows]

    def _model_input(
        self,
        buffers: InputBuffers,
        sequences: Sequence[ScheduledSequence],
        shape: BatchShape,
        tables: StepTables,
        images: RowsOfImages,
        output_rows: torch.Tensor | None,
    ) -> ModelInput:
        count, tokens, context_lens = shape.num_sequences, shape.num_rows, tuple(shape.context_lens)
        return ModelInput(
            buffers.input_ids_dev[:tokens],
            buffers.positions_dev[:tokens],
            AttentionMetadata(
                slot_mapping=buffers.slots_dev[:tokens],
                block_tables=tables.select(sequences, buffers.rows_dev),
                block_counts=buffers.block_counts_dev[:count],
                context_lens=buffers.context_lens_dev[:count],
                cu_seqlens_q=buffers.starts_dev[: count + 1],
                max_seqlen_q=shape.longest_query,
                max_context_len=shape.longest_context,
                query_lens_cpu=tuple(shape.lens),
                # With a sequence ahead they are the most.
                context_lens_cpu=None if any(s.is_ahead for s in sequences) else context_lens,
                most_context_cpu=context_lens,
                padding_lens=(
                    buffers.padding_dev[:count]
                    if shape.is_captured and shape.longest_query > 1
                    else None
                ),
                state_rows=buffers.state_rows_dev[:count],
            ),
            output_rows,
            *images,
            buffers.shifts_dev[:tokens] if self.images.mrope else None,
        )


def runs_op_by_op(*_: int) -> GraphKey | None:
    """The `FitOp` of engines without graphs."""
    return None
