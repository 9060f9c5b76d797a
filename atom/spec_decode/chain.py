"""The single-token draft steps after a proposer's first pass.

No host sync inside, so that all steps are captured in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from atom.graphs.capture import Bucket, GraphPlan, fill_rows
from atom.model_ops.kernels.torch.speculation import advance_drafts
from atom.model_ops.metadata import AttentionMetadata, SamplingMetadata
from atom.spec_decode.base import Guide, Proposal, VerifiedStep
from atom.spec_decode.choice import Chosen

# (index of the draft, token ids [S], hidden [S, hidden], positions [S], metadata, race, guide) ->
# (next drafts, hidden states for the next step)
PredictOp = Callable[
    [
        int,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        AttentionMetadata,
        SamplingMetadata | None,
        Guide | None,
    ],
    tuple[Chosen, torch.Tensor],
]
# The op of this name.
AdvanceOp = Callable[
    [torch.Tensor, int, torch.Tensor, torch.Tensor, int, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]


# Of temperature, top_k, top_p, min_p, seeds and positions: values without effect.
_OPTIONS_OFF = (0, 2**31 - 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class ChainStart:
    """The input of the first chain step for S sequences.

    Attributes:
        token_ids: [S] int64; the first drafts.
        hidden: [S, hidden]; the hidden states that go with them.
        positions: [S] int64; of the rows that the first drafts were made from.
        block_tables: [S, max_blocks] int32.
        block_counts: [S] int32; blocks of each sequence.
        max_context_len: upper bound of the context lengths in the last step.
        race, guide: as in `VerifiedStep`.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    block_counts: torch.Tensor
    max_context_len: int
    race: SamplingMetadata | None = None
    guide: Guide | None = None


class DraftChain:
    """Single-token draft steps, run eagerly or replayed from a CUDA graph.

    Graphs are captured for the full number of steps only, one per bucket. Fewer steps, or a batch
    that fits no bucket, run eagerly.

    Args:
        predict: one draft step, which also writes the draft's KV.
        num_drafts: the maximum number of drafts, including the first.
        advance: the op `advance_drafts`.
    """

    def __init__(
        self,
        predict: PredictOp,
        num_drafts: int,
        block_size: int,
        max_model_len: int,
        advance: AdvanceOp = advance_drafts,
    ) -> None:
        self._predict = predict
        self._advance_drafts = advance
        self._num_steps = num_drafts - 1
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._graphs: DraftGraphs | None = None

    def capture(self, plan: GraphPlan, hidden: torch.Tensor, *, confident: bool = False) -> None:
        """Capture the graphs. The KV cache must be bound and must not move afterwards.

        Args:
            hidden: a tensor with the width and dtype of the hidden states that start a chain.
            confident: whether drafts come with confidences.
        """
        if self._num_steps:
            self._graphs = DraftGraphs(plan, hidden, self._num_steps, self.run_eagerly, confident)

    def release_graphs(self) -> None:
        self._graphs = None

    def extend(
        self,
        step: VerifiedStep,
        positions: torch.Tensor,
        first: Chosen,
        hidden: torch.Tensor,
        num_drafts: int,
    ) -> Proposal:
        """Make the remaining drafts from the first ones and their hidden states [S, hidden].

        Args:
            positions: [S], of the rows that the first drafts were made from.
            num_drafts: at least 1. Without any sequence a padding row is computed: other ranks may
                wait for this one's experts.

        Returns:
            The first drafts included.
        """
        columns = [t[:, None] for t in first.tensors]
        if num_drafts == 1:
            return Proposal(*columns)
        start = self._start(step, positions, first.token_ids, hidden, num_drafts - 1)
        if not len(positions):
            self.run(_padding(start), num_drafts - 1)
            return Proposal(*(t.new_empty((0, num_drafts)) for t in columns))
        rest = self.run(start, num_drafts - 1).tensors
        return Proposal(*(torch.cat(pair, dim=1) for pair in zip(columns, rest, strict=True)))

    def run(self, start: ChainStart, num_steps: int) -> Proposal:
        """Draft `num_steps` more tokens, valid until the next run."""
        is_captured = num_steps == self._num_steps and start.guide is None
        if self._graphs is not None and is_captured:
            drafts = self._graphs.replay(start)
            if drafts is not None:
                return drafts
        return self.run_eagerly(start, num_steps)

    def run_eagerly(self, start: ChainStart, num_steps: int) -> Proposal:
        """Like `run`, without graphs."""
        token_ids, hidden = start.token_ids, start.hidden
        drafts: list[Chosen] = []
        for i in range(num_steps):
            positions, metadata = self._advance(start, i + 1)
            chosen, hidden = self._predict(
                i + 1, token_ids, hidden, positions, metadata, start.race, start.guide
            )
            token_ids = chosen.token_ids
            drafts.append(chosen)
        columns = zip(*(chosen.tensors for chosen in drafts), strict=True)
        return Proposal(*(torch.cat([t[:, None] for t in each], dim=1) for each in columns))

    def _start(
        self,
        step: VerifiedStep,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        num_steps: int,
    ) -> ChainStart:
        """The chain's start after the last rows of the sampled sequences.

        `step.last_rows` precede the newest token, whose KV is not computed, by one position.
        """
        metadata = step.model_input.attention
        tables, counts = metadata.block_tables, metadata.block_counts
        if step.sampled is not None:
            tables, counts = tables[step.sampled], counts[step.sampled]
        longest = min(metadata.max_context_len + num_steps, self._max_model_len)
        limits = tables, counts, longest
        return ChainStart(token_ids, hidden, positions, *limits, step.race, step.guide)

    def _advance(self, start: ChainStart, step: int) -> tuple[torch.Tensor, AttentionMetadata]:
        """Positions and metadata for one token of each sequence, `step` positions after the start.

        Beyond its blocks or `max_model_len`, a sequence stays at its last position with slot -1:
        the scheduler never verifies those drafts.
        """
        tables = start.block_tables
        count, capacity = tables.shape[0], tables.shape[1] * self._block_size
        positions, slots, context_lens, starts = self._advance_drafts(
            start.positions,
            step,
            tables,
            start.block_counts,
            self._block_size,
            self._max_model_len,
        )
        return positions, AttentionMetadata(
            slot_mapping=slots,
            block_tables=tables,
            block_counts=start.block_counts,
            context_lens=context_lens,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            max_context_len=min(start.max_context_len, capacity),
            query_lens_cpu=(1,) * count,
            context_lens_cpu=None,
        )


def _padding(like: ChainStart) -> ChainStart:
    """One row without blocks, so it writes no KV."""
    return ChainStart(
        like.token_ids.new_zeros(1),
        like.hidden.new_zeros(1, like.hidden.shape[1]),
        like.positions.new_zeros(1),
        like.block_tables.new_zeros(1, like.block_tables.shape[1]),
        like.block_counts.new_zeros(1),
        like.max_context_len,
    )


# Of greedy drafts, and of random ones.
GRAPHS_PER_BUCKET = 2


class DraftGraphs:
    """A proposer's work on the sampled sequences, captured for every bucket.

    Padding rows have no blocks, so they write no KV.
    """

    def __init__(
        self,
        plan: GraphPlan,
        hidden: torch.Tensor,
        num_steps: int,
        run: Callable[[ChainStart, int], Proposal],
        confident: bool,
    ) -> None:
        self._plan = plan
        self._run = run
        size, device = plan.batch_sizes[-1], plan.device
        self._buffers = ChainStart(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            hidden=torch.zeros(size, hidden.shape[-1], dtype=hidden.dtype, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            block_tables=torch.zeros(size, plan.table_width, dtype=torch.int32, device=device),
            block_counts=torch.zeros(size, dtype=torch.int32, device=device),
            max_context_len=plan.context_bounds[-1],
            race=SamplingMetadata(
                temperature=torch.zeros(size, device=device),
                top_k=torch.zeros(size, dtype=torch.int32, device=device),
                top_p=torch.zeros(size, device=device),
                min_p=torch.zeros(size, device=device),
                seeds=torch.zeros(size, dtype=torch.int64, device=device),
            ),
        )
        shape = size, num_steps
        self._drafts = Proposal(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device) if confident else None,
        )
        # By bucket, and whether some drafts are not greedy.
        self._replays: dict[tuple[Bucket, bool], Callable[[], None]] = {}
        with torch.inference_mode():
            for bucket in plan.buckets():
                for races in (False, True):
                    work = partial(self._compute, bucket, races)
                    self._replays[bucket, races] = plan.backend.capture(work)

    def replay(self, start: ChainStart) -> Proposal | None:
        """The drafts; None when no bucket fits."""
        count = len(start.token_ids)
        bucket = self._plan.fit(count, start.max_context_len)
        if bucket is None:
            return None
        buffers, size = self._buffers, bucket.batch_size
        fill_rows(buffers.token_ids, start.token_ids, size, 0)
        fill_rows(buffers.hidden, start.hidden, size, 0)
        fill_rows(buffers.positions, start.positions, size, 0)
        fill_rows(buffers.block_tables, start.block_tables, size, 0)
        fill_rows(buffers.block_counts, start.block_counts, size, 0)
        if start.race is not None:
            self._fill_race(start.race, size)
        self._replays[bucket, start.race is not None]()
        return Proposal(*(t[:count] for t in self._drafts.tensors))

    def _fill_race(self, race: SamplingMetadata, size: int) -> None:
        """Greedy padding; the graph reads every option, so those that no row needs are off."""
        assert self._buffers.race is not None
        for buffer, option, off in zip(
            self._buffers.race.tensors, race.tensors, _OPTIONS_OFF, strict=True
        ):
            if option is not None and buffer is not None:
                fill_rows(buffer, option, size, off)
            elif buffer is not None:
                buffer[:size].fill_(off)

    def _compute(self, bucket: Bucket, races: bool) -> None:
        """The captured work of one bucket."""
        buffers, size = self._buffers, bucket.batch_size
        start = ChainStart(
            buffers.token_ids[:size],
            buffers.hidden[:size],
            buffers.positions[:size],
            buffers.block_tables[:size],
            buffers.block_counts[:size],
            bucket.max_context_len,
            buffers.race.select(slice(size)) if races and buffers.race is not None else None,
        )
        made = self._run(start, self._drafts.token_ids.shape[1])
        for kept, drafts in zip(self._drafts.tensors, made.tensors, strict=True):
            kept[:size].copy_(drafts)
