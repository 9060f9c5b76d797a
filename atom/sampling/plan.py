"""Which rows of a step are sampled, and with what options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from atom.batch import ScheduledSequence
from atom.graphs.staging import StagingBuffer
from atom.sampling.edits import LogitEdits, SampledRows
from atom.sampling.rows import SequenceState
from atom.sampling.synthetic import SyntheticAcceptance, SyntheticCounts
from atom.sampling_params import ALL_LOGPROBS, Needs

# Tokens of a vocabulary.
_MORE_THAN_ANY = 2**31
# Padding of drafts; equals no sampled token.
NO_DRAFT = -2
_FILTERS = Needs.TOP_K | Needs.TOP_P | Needs.MIN_P
# How rows may be chosen, cheapest first: greedily, at a temperature, with filters.
KINDS = (Needs(0), Needs.TEMPERATURE, Needs.TEMPERATURE | _FILTERS)


def kind_of(needs: Needs) -> Needs:
    """The cheapest kind that chooses rows with these needs right; other needs do not count."""
    wanted = needs & KINDS[-1]
    return next(kind for kind in KINDS if wanted & kind == wanted)


@dataclass(frozen=True)
class RowLayout:
    """The R rows of logits of the S sampled sequences; on the host.

    A batch of a chunk of a prompt, p0 p1, a sequence with two drafts, a b0 b1, and one without, c,
    has rows [p0, p1, a, b0, b1, c] in the forward pass, whose sequences end at [2, 5, 6]. Then
    `indices` is [1, 2], `num_drafts` [2, 0], `logits_indices` [2, 3, 4, 5] (a, b0, b1, c), `owners`
    [0, 0, 0, 1], `offsets` [0, 1, 2, 0], `first` [0, 3] and `most` 2; `table` is
    [[0, 1, 2], [3, 3, 3]] and `drafts` are [[b0, b1], [NO_DRAFT, NO_DRAFT]], written from
    `draft_rows` [3, 4] to `draft_places` [0, 1].

    Attributes:
        indices: [S], batch index of each sampled sequence.
        num_drafts: [S].
        first: [S], the first logits row of each.
        logits_indices: [R], row of the forward pass for each row of logits.
        owners, offsets: [R], which of the S sequences a row belongs to, and its place among that
            one's.
        most: k, the places for drafts of each sequence.
        draft_rows, draft_places: of all drafts, their rows of the forward pass, and their places
            among the S * k.
    """

    indices: list[int]
    num_drafts: np.ndarray
    first: np.ndarray
    logits_indices: np.ndarray
    owners: np.ndarray
    offsets: np.ndarray
    most: int
    draft_rows: np.ndarray
    draft_places: np.ndarray

    @classmethod
    def of(
        cls, sequences: Sequence[ScheduledSequence], ends: np.ndarray, ragged_most: int = 0
    ) -> RowLayout:
        """Args:
        ends: [B], where each sequence's rows of the forward pass end.
        ragged_most: places for drafts, at least, where numbers of drafts differ.
        """
        indices = [i for i, s in enumerate(sequences) if s.wants_sample]
        num_drafts = np.array([sequences[i].num_drafts for i in indices], dtype=np.int64)
        counts = num_drafts + 1
        first = np.cumsum(counts) - counts
        owners = np.repeat(np.arange(len(indices)), counts)
        begins = ends[indices] - counts if indices else counts
        offsets = np.arange(len(owners)) - first[owners]
        logits_indices = begins[owners] + offsets
        most = int(num_drafts.max(initial=0))
        if len(owners) != len(indices) * (most + 1):
            most = max(most, ragged_most)
        later = np.flatnonzero(offsets)
        places = owners[later] * most + offsets[later] - 1
        rows = logits_indices[later]
        return cls(indices, num_drafts, first, logits_indices, owners, offsets, most, rows, places)

    def table(self) -> np.ndarray | None:
        """[S, k + 1] logits rows, padded by repeating the last; None when all have k drafts."""
        if len(self.owners) == len(self.indices) * (self.most + 1):
            return None
        steps = np.minimum(np.arange(self.most + 1), self.num_drafts[:, None])
        table: np.ndarray = self.first[:, None] + steps
        return table

    def drafts(self, token_ids: np.ndarray) -> np.ndarray:
        """[S, k] draft tokens, taken from the forward pass's tokens and padded with `NO_DRAFT`."""
        drafts = np.full((len(self.indices), self.most), NO_DRAFT)
        drafts.reshape(-1)[self.draft_places] = token_ids[self.draft_rows]
        return drafts


@dataclass(frozen=True)
class PromptRows:
    """One sequence whose prompt logprobs are requested.

    Attributes:
        index: its batch index.
        first: its first row in the forward pass; row `first + i` predicts target i.
        targets: [M] int64, prompt tokens.
        num_targets: M.
        wanted: how many most likely tokens to report.
    """

    index: int
    first: int
    targets: torch.Tensor
    num_targets: int
    wanted: int


@dataclass(frozen=True)
class SamplePlan:
    """What a step samples. Tensors are valid after `staging.send`.

    Attributes:
        layout, states: of the S sampled sequences.
        logits_indices: [R] int64.
        table: [S, k + 1] int64; None when all have k drafts.
        drafts: [S, k] int64; None when no sequence has any.
        rows, positions: [R] int64: the sequence row of each row of logits, and the position of the
            token that it predicts; None when every row is greedy.
        needs: of all sequences together.
        create_edits: call after the send; None without edits.
        logprob_rows: [L] int64, and how many most likely tokens to report for each; None without.
        penalised: indices [n] int64 into S, and their `TokenCounts` slots; None without.
        prompts: the sequences with prompt logprobs.
        synthetic: how many drafts count as accepted, whatever is sampled; None if that decides.
        filters: how all rows are chosen, one of `KINDS`.
        kind: `filters`; None where the first rank alone knows what else is done with their logits:
            edits, or logprobs.
    """

    layout: RowLayout
    states: list[SequenceState]
    logits_indices: torch.Tensor
    table: torch.Tensor | None
    drafts: torch.Tensor | None
    rows: torch.Tensor | None
    positions: torch.Tensor | None
    needs: Needs
    create_edits: Callable[[], LogitEdits] | None
    logprob_rows: tuple[torch.Tensor, list[int]] | None
    penalised: tuple[torch.Tensor, torch.Tensor] | None
    prompts: list[PromptRows]
    synthetic: SyntheticCounts | None
    filters: Needs
    kind: Needs | None

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the argmax of its logits, and nothing else is read of them."""
        return self.kind == Needs(0)

    @property
    def samples_on_device(self) -> bool:
        """Whether all that sampling reads is in tensors: no edits, logprobs or penalties."""
        special = (self.create_edits, self.logprob_rows, self.penalised)
        return bool(self.states) and not self.prompts and all(part is None for part in special)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What a plain plan reads."""
        return self.logits_indices, self.table, self.rows, *self.repeated

    @property
    def repeated(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What differs between steps of the same layout: drafts, positions, synthetic counts."""
        synthetic = None if self.synthetic is None else self.synthetic.counts
        return self.drafts, self.positions, synthetic


@dataclass(frozen=True)
class DecodeRows:
    """B sequences with n rows each, T in all: a newest token, its drafts, and padding behind them.

    Attributes:
        rows: [B] int64, of the sampling state.
        input_ids, positions: [T] int64.
        places: [T] int64, 0 to T - 1.
        num_drafts: [B] int64.
        next_token_ids: [T] int64, which gets the sampled tokens; None if nobody reads them.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    num_drafts: torch.Tensor
    next_token_ids: torch.Tensor | None

    @property
    def query_len(self) -> int:
        return len(self.input_ids) // len(self.rows)


def put_synthetic(
    acceptance: SyntheticAcceptance,
    layout: RowLayout,
    states: Sequence[SequenceState],
    positions: np.ndarray,
    staging: StagingBuffer,
) -> SyntheticCounts:
    """Args:
    positions: [T] of the forward pass.
    """
    seeds = np.array([state.seed for state in states], dtype=np.int64)
    at = partial(acceptance.counts, seeds, num_drafts=layout.num_drafts)
    newest = positions[layout.logits_indices[layout.first]].astype(np.int64)
    return SyntheticCounts(staging.put(at(newest)), at)


def sampled_rows(
    sequences: Sequence[ScheduledSequence],
    layout: RowLayout,
    states: Sequence[SequenceState],
    chosen: Sequence[int],
) -> list[SampledRows]:
    """The rows of the `chosen` ones among the S sampled sequences."""
    return [
        SampledRows(
            states[s],
            sequences[layout.indices[s]].row,
            int(layout.first[s]),
            sequences[layout.indices[s]].draft_token_ids,
        )
        for s in chosen
    ]


def put_logprob_rows(
    layout: RowLayout, states: Sequence[SequenceState], wanted: np.ndarray, staging: StagingBuffer
) -> tuple[torch.Tensor, list[int]] | None:
    """The rows that need logprobs, and how many most likely tokens to report for each.

    Args:
        wanted: [S], nonzero for the sequences that need them.
    """
    mine = np.flatnonzero(wanted[layout.owners])
    if not len(mine):
        return None
    counts = [_num_alternatives(states[s].params.logprobs) for s in layout.owners[mine].tolist()]
    return staging.put(mine), counts


def put_penalised(
    states: Sequence[SequenceState], wanted: np.ndarray, staging: StagingBuffer
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Indices [n] into S of sequences with penalties, and their `TokenCounts` slots."""
    chosen = np.flatnonzero(wanted)
    if not len(chosen):
        return None
    slots = [states[s].penalty_slot for s in chosen.tolist()]
    return staging.put(chosen), staging.put(np.array(slots))


def put_prompt(
    index: int,
    sequence: ScheduledSequence,
    state: SequenceState,
    ends: np.ndarray,
    staging: StagingBuffer,
) -> PromptRows | None:
    """The rows for prompt logprobs in this step; None when there are none.

    A resumed sequence with outputs has none: they were reported with its first output.

    Args:
        index: its batch index.
        ends: [B], where each sequence's rows end.
    """
    wanted = state.params.prompt_logprobs
    targets = state.prompt_token_ids[sequence.start + 1 : sequence.context_len + 1]
    if wanted is None or state.output_token_ids or not targets:
        return None
    first = int(ends[index]) - len(sequence.token_ids)
    alternatives = _num_alternatives(wanted)
    return PromptRows(index, first, staging.put(np.array(targets)), len(targets), alternatives)


def _num_alternatives(wanted: int | None) -> int:
    return _MORE_THAN_ANY if wanted == ALL_LOGPROBS else wanted or 0
