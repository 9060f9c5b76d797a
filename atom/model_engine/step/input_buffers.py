"""What a step reads on the device: which rows its tokens get, and where its arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from atom.batch import ScheduledSequence
from atom.graphs.capture import GraphKey
from atom.graphs.recorded import Recording
from atom.graphs.staging import StagingBuffer
from atom.kv_cache.block_tables import BlockTables
from atom.model_ops.attention.metadata import AttentionMetadata, ModelInput
from atom.model_ops.kernels.torch.gather import take_inputs
from atom.sampling.plan import SamplePlan
from atom.sampling.sampler import Verified
from atom.spec_decode.proposers.base import Proposal

# The op `take_inputs`.
TakeOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
]


@dataclass(frozen=True)
class CarriedAcceptance:
    """Synthetic acceptance of A sequences that are ahead, at each place where they may be.

    Attributes:
        which: [A] int64, of the S sampled sequences.
        most: [A] int64, the highest position that the newest token may have.
        counts: [1 + k, A] int64, accepted drafts by how much lower it is.
    """

    which: torch.Tensor
    most: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class CarriedPlan:
    """Which rows of a step take what was left, and which leave something; valid after the send.

    Attributes:
        taken, num_newest: as the op `take_carried` has them; 0 if no sequence is ahead, and then
            nothing is taken.
        left: as the op `leave_carried` has it.
        known: [2, n] int64, places in `CarriedTokens.token_ids`, flattened, and the drafts of the
            host that belong there; None if there are none.
        acceptance: where it is synthetic.
    """

    taken: torch.Tensor
    num_newest: int
    left: torch.Tensor
    known: torch.Tensor | None = None
    acceptance: CarriedAcceptance | None = None


NOTHING_TAKEN = torch.empty(6, 0, dtype=torch.int64)
NOTHING_CARRIED = CarriedPlan(NOTHING_TAKEN, 0, torch.empty(2, 0, dtype=torch.int64))


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


class NothingCarried:
    """Steps that do not overlap leave nothing on the device.

    Attributes:
        overlaps: whether they do.
    """

    overlaps = False

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
        return NOTHING_CARRIED

    def take(self, step: StepInput, tables: BlockTables, block_size: int) -> None:
        """Write into the inputs of a step with sequences ahead what the last one left."""

    def leave(self, step: StepInput, verified: Verified, proposed: Proposal | None) -> None:
        """Leave a step's tokens and drafts for the next one, which may be launched before they are
        read.
        """


class StepLayout:
    """Which rows of a step the tokens of a batch get.

    In a graph all sequences have as many rows: those behind a sequence's tokens are padding. Of
    sequences in rows 5 and 2 with tokens a and b0 b1, op by op `token_rows` is [0, 1, 2] and `ends`
    [1, 3]; in a graph for queries of 2 the rows are [a, -, b0, b1], `token_rows` [0, 2, 3] and
    `ends` [1, 4]. `owners` is [0, 1, 1] and `offsets` [0, 0, 1] in both.

    Attributes:
        graph: the graph to replay, or None.
        is_captured: whether there is one.
        buffer_size: rows and sequences of the buffers: T and B, or those of the graph.
        query_lens: [B], padding included.
        num_rows: T, the sum of these lengths.
        longest_query: the largest of them, or an upper bound.
        rows: [B], the sequences' rows in the tables.
        ends: [B], the row after each sequence's last token.
        token_rows, owners, offsets: of each of N tokens, its row of T, which of the B sequences it
            belongs to, and its place among that one's tokens.
    """

    def __init__(
        self, sequences: Sequence[ScheduledSequence], graph: GraphKey | None, ragged_len: int
    ) -> None:
        lens = [len(s.token_ids) for s in sequences]
        num_tokens, count = np.array(lens), len(lens)
        self.graph, self.is_captured = graph, graph is not None
        self.longest_query, self.buffer_size = max(lens), (sum(lens), count)
        if graph is not None:
            self.longest_query, self.buffer_size = (
                graph.query_len,
                (graph.num_rows, graph.batch_size),
            )
            lens = [graph.query_len] * count
        elif min(lens) != self.longest_query:
            self.longest_query = max(self.longest_query, ragged_len)
        self.query_lens, self.num_sequences, self.num_rows = tuple(lens), count, sum(lens)
        self.rows = np.array([s.row for s in sequences])
        begins = np.cumsum(lens) - lens
        self.ends = begins + num_tokens
        self.owners = np.repeat(np.arange(count), num_tokens)
        first = np.cumsum(num_tokens) - num_tokens
        self.offsets = np.arange(len(self.owners)) - first[self.owners]
        self.token_rows = begins[self.owners] + self.offsets
        self._table_rows = self.rows[self.owners]
        self._lens = np.array(lens)

    def fill(
        self,
        buffers: InputBuffers,
        sequences: Sequence[ScheduledSequence],
        starts: np.ndarray,
        tables: BlockTables,
        block_size: int,
    ) -> np.ndarray:
        """Write what differs between steps of this layout; returns the N tokens' positions.

        Args:
            starts: [B], the positions of the sequences' first tokens.
        """
        count = self.num_sequences
        where = self.token_rows if self.is_captured else slice(None)
        positions: np.ndarray = starts[self.owners] + self.offsets
        buffers.input_ids[where] = [token for s in sequences for token in s.token_ids]
        buffers.positions[where] = positions
        buffers.slots[where] = tables.slots_at(self._table_rows, positions, block_size)
        buffers.context_lens[:count] = starts + self._lens
        buffers.block_counts[:count] = [s.num_blocks for s in sequences]
        return positions


class InputBuffers:
    """Host arrays and device tensors (`*_dev`) of a forward pass over T tokens of B sequences.

    Args:
        drafts: whether the token after each row is wanted.
        captured: whether a graph reads them.
        mrope: whether tokens rotate by three numbers; else there are no shifts.
    """

    def __init__(
        self,
        staging: StagingBuffer,
        num_tokens: int,
        num_sequences: int,
        *,
        drafts: bool,
        captured: bool,
        mrope: bool,
    ) -> None:
        self.input_ids, self.input_ids_dev = staging.reserve(num_tokens)
        self.positions, self.positions_dev = staging.reserve(num_tokens)
        self.slots, self.slots_dev = staging.reserve(num_tokens)
        self.successors, self.successors_dev = staging.reserve(num_tokens if drafts else 0)
        self.sources, self.sources_dev = staging.reserve(num_tokens if captured else 0)
        shifts, shifts_dev = staging.reserve(3 * num_tokens if mrope else 0)
        self.shifts, self.shifts_dev = shifts.reshape(-1, 3), shifts_dev.view(-1, 3)
        self.rows, self.rows_dev = staging.reserve(num_sequences)
        self.state_rows, self.state_rows_dev = staging.reserve(num_sequences)
        self.num_drafts, self.num_drafts_dev = staging.reserve(num_sequences if captured else 0)
        self.context_lens, self.context_lens_dev = staging.reserve(num_sequences, torch.int32)
        self.block_counts, self.block_counts_dev = staging.reserve(num_sequences, torch.int32)
        self.starts, self.starts_dev = staging.reserve(num_sequences + 1, torch.int32)
        padded = num_sequences if captured else 0
        self.padding, self.padding_dev = staging.reserve(padded, torch.int32)
        self._drafts, self._captured, self._mrope = drafts, captured, mrope

    def pad(self, query_len: int, token_rows: np.ndarray, padding_row: int) -> None:
        """Fill everything with padding: sequences with slot -1 (no KV write) and a context of
        `query_len` tokens, whose rows repeat the last token of the batch.

        Args:
            token_rows: the rows that are no padding, if any; ascending.
            padding_row: of the pools of states, which no sequence has.
        """
        self.input_ids[:] = 0
        self.positions[:] = 0
        self.slots[:] = -1
        self.successors[:] = 0
        self.shifts[:] = 0
        self.num_drafts[:] = 0
        self.sources[:] = token_rows[-1] if len(token_rows) else 0
        self.sources[token_rows] = token_rows
        self.rows[:] = 0
        self.state_rows[:] = padding_row
        self.block_counts[:] = 0
        # A context cannot be shorter than its queries; a key is left for attention to read.
        self.context_lens[:] = query_len
        self.padding[:] = query_len - 1
        self.starts[:] = np.arange(len(self.starts)) * query_len

    def model_input(
        self,
        query_lens: tuple[int, ...],
        longest_query: int,
        block_tables: torch.Tensor,
        max_context_len: int,
    ) -> ModelInput:
        """The input of the first sequences, as long as these; their contexts are unknown."""
        tokens, count = sum(query_lens), len(query_lens)
        has_padding = self._captured and longest_query > 1
        return ModelInput(
            self.input_ids_dev[:tokens],
            self.positions_dev[:tokens],
            AttentionMetadata(
                slot_mapping=self.slots_dev[:tokens],
                block_tables=block_tables,
                block_counts=self.block_counts_dev[:count],
                context_lens=self.context_lens_dev[:count],
                cu_seqlens_q=self.starts_dev[: count + 1],
                max_seqlen_q=longest_query,
                max_context_len=max_context_len,
                query_lens_cpu=query_lens,
                context_lens_cpu=None,
                padding_lens=self.padding_dev[:count] if has_padding else None,
                state_rows=self.state_rows_dev[:count],
            ),
            mrope_shifts=self.shifts_dev[:tokens] if self._mrope else None,
        )

    def next_token_ids(self, num_rows: int) -> torch.Tensor | None:
        """[T] int64, of the first rows; None where they are not wanted."""
        return self.successors_dev[:num_rows] if self._drafts else None


@dataclass(frozen=True)
class GraphInput:
    """Where a graph finds its inputs: T rows of B sequences, padding included.

    Attributes:
        model_input: of all of them. Rows of padding have no token yet, and block tables are those
            of the last `read`.
        sources: [T] int64, the rows whose tokens and positions the rows get: their own, or for
            padding the batch's last one. So padding visits no experts of its own, also where only
            the device knows the tokens.
        rows: [B] int64, the sequences' rows in `tables`.
        num_drafts: [B] int64, of a sequence whose other token is its newest.
        next_token_ids: [T] int64, the token after each row; None without a proposer that reads it.
        tables: [rows, width] int32.
        take: the op `take_inputs`.
    """

    model_input: ModelInput
    sources: torch.Tensor
    rows: torch.Tensor
    num_drafts: torch.Tensor
    next_token_ids: torch.Tensor | None
    tables: torch.Tensor
    take: TakeOp = take_inputs

    def read(self) -> ModelInput:
        """The model's input, with padding and block tables as they are now.

        It has metadata of its own in each run of a capture. Otherwise the captured run would find
        tensors that a warm-up run derived, and the graph would not recompute them.
        """
        model_input = self.model_input
        attention = replace(model_input.attention)
        input_ids, positions = self.take(
            self.tables,
            self.rows,
            attention.block_tables,
            model_input.input_ids,
            model_input.positions,
            self.sources,
        )
        shifts = model_input.mrope_shifts
        return ModelInput(input_ids, positions, attention, mrope_shifts=shifts)
