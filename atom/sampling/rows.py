"""The sampling state of each live sequence, by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import torch

from atom.batch import NewSequence
from atom.graphs.staging import StagingBuffer
from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.upload import upload
from atom.sampling.logit_constraints import BadWords, TokenValues, allowed_mask, read_bad_words
from atom.sampling.token_counts import TokenCounts
from atom.sampling_params import Needs, SamplingParams
from atom.structured_output.base import TokenMask
from atom.structured_output.cache import GrammarCache
from atom.structured_output.state import GrammarState


@dataclass
class SequenceState:
    """The sampling state of one sequence.

    Attributes:
        output_token_ids: all sampled tokens so far.
        end_ids: tokens that are banned before `min_tokens` outputs.
        grammar: its state after the outputs; None without a grammar.
        bias: the logit bias, if any.
        bans: the ban of `end_ids`, if any.
        allowed: bit mask [ceil(V / 32)] int32 of `allowed_token_ids`, if any.
        bad_words: tokens that are banned after certain others.
        penalty_slot: its slot in `TokenCounts`; None without penalties.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    needs: Needs
    end_ids: tuple[int, ...] = ()
    grammar: GrammarState | None = None
    bias: TokenValues | None = None
    bans: TokenValues | None = None
    allowed: TokenMask | None = None
    bad_words: list[BadWords] = field(default_factory=list)
    penalty_slot: int | None = None

    def extend(self, token_ids: list[int]) -> int:
        """Append sampled tokens; returns how many the grammar accepts."""
        self.output_token_ids += token_ids
        return len(token_ids) if self.grammar is None else self.grammar.advance(token_ids)


# The op `sampling_options`.
OptionsOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]
]

# Rows of the options tensor.
_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION, _TOP_K = range(7)


class SamplingRows:
    """The sampling states of live sequences, and their options on the device.

    A new sequence's options are uploaded with the step's staging buffer. Token lists (a prompt with
    penalties, logit bias, end tokens) are uploaded separately.

    Attributes:
        needs: [num_rows] int64, the `Needs` of each row's sequence.
        counts: token counts of the sequences with penalties.

    Args:
        grammars: None on a rank that does not sample.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        grammars: GrammarCache | None,
    ) -> None:
        self.needs = np.zeros(num_rows, dtype=np.int64)
        self.counts = TokenCounts(vocab_size, device)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._grammars = grammars
        self._states: list[SequenceState | None] = [None] * num_rows
        # Shared by live sequences, since most ban the same tokens.
        self._bans: WeakValueDictionary[tuple[int, ...], TokenValues] = WeakValueDictionary()
        # [7, num_rows], so that each option is contiguous after gathering a step's rows.
        self._options = torch.zeros(7, num_rows, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._update: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __getitem__(self, row: int) -> SequenceState:
        state = self._states[row]
        assert state is not None, f"row {row} has no sequence"
        return state

    def states(self, rows: np.ndarray) -> list[SequenceState]:
        """The states of rows [S], which must all have a sequence."""
        known = self._states
        states = [state for row in rows.tolist() if (state := known[row]) is not None]
        assert len(states) == len(rows), "a row has no sequence"
        return states

    def forget(self, rows: Sequence[int]) -> None:
        """Remove the sequences of these rows; a row may be empty already."""
        for row in rows:
            state, self._states[row] = self._states[row], None
            if state is not None and state.penalty_slot is not None:
                self.counts.release(state.penalty_slot)

    def learn(self, new: Sequence[NewSequence], staging: StagingBuffer) -> None:
        """Add sequences; on the device only after `staging.send` and `update`."""
        self._update = None
        if not new:
            return
        for sequence in new:
            state = self._create(sequence)
            self._states[sequence.row] = state
            self.needs[sequence.row] = int(state.needs)
        params = [s.params for s in new]
        options = np.array(
            [
                [0.0 if p.is_greedy else p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                [p.presence_penalty for p in params],
                [p.frequency_penalty for p in params],
                [p.repetition_penalty for p in params],
                [0.0] * len(params),
            ],
            dtype=np.float32,
        )
        top_k = [p.top_k if p.top_k > 0 else self._vocab_size for p in params]
        options[_TOP_K] = np.array(top_k, dtype=np.int32).view(np.float32)
        self._update = (
            staging.put(np.array([s.row for s in new])),
            staging.put(options, torch.float32),
            staging.put(np.array([s.seed for s in new], dtype=np.int64)),
        )

    def update(self) -> None:
        """Write the new sequences' options to the device tables."""
        if self._update is not None:
            rows, options, seeds = self._update
            self._options.index_copy_(1, rows, options)
            self._seeds.index_copy_(0, rows, seeds)

    def metadata(
        self,
        rows: torch.Tensor | None,
        positions: torch.Tensor | None,
        needs: Needs,
        gather: OptionsOp,
        repeats: int = 1,
    ) -> SamplingMetadata:
        """Sampling options for rows of logits; those that no row needs are None.

        Args:
            rows: [R / repeats] int64, the sequence row of each and the next ones; None when every
                row is greedy.
            positions: [R] int64, of the tokens to sample; None likewise.
            needs: of all rows combined.
            gather: the op `sampling_options`.
        """
        if rows is None:
            return SamplingMetadata()
        gathered, seeds = gather(self._options, self._seeds, rows, repeats)
        options = gathered.unbind(0)
        return SamplingMetadata(
            temperature=options[_TEMPERATURE],
            top_k=options[_TOP_K].view(torch.int32) if needs & Needs.TOP_K else None,
            top_p=options[_TOP_P] if needs & Needs.TOP_P else None,
            min_p=options[_MIN_P] if needs & Needs.MIN_P else None,
            seeds=seeds,
            positions=positions,
        )

    def penalties(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Presence, frequency and repetition penalties of rows [R] int64: [R, 1] each."""
        options = self._options.index_select(1, rows)[:, :, None]
        return options[_PRESENCE], options[_FREQUENCY], options[_REPETITION]

    def _create(self, new: NewSequence) -> SequenceState:
        p = new.params
        outputs = list(new.output_token_ids)
        state = SequenceState(p, new.seed, new.prompt_token_ids, outputs, p.needs)
        if p.structured_output is not None:
            # A resumed sequence already has outputs.
            assert self._grammars is not None, "only the first rank samples"
            grammar = self._grammars.get(p.structured_output)
            state.grammar = GrammarState(grammar.create_matcher(), grammar.spelling)
            state.grammar.advance(outputs)
        if state.needs & Needs.MIN_TOKENS:
            ends = frozenset() if p.ignore_eos else self._eos_token_ids
            state.end_ids = tuple(sorted({*ends, *(p.stop_token_ids or ())}))
            state.bans = self._bans.get(state.end_ids)
            if state.bans is None:
                state.bans = self._token_values(dict.fromkeys(state.end_ids, -torch.inf))
                self._bans[state.end_ids] = state.bans
        if p.logit_bias:
            state.bias = self._token_values(p.logit_bias)
        if p.allowed_token_ids is not None:
            state.allowed = allowed_mask(p.allowed_token_ids, self._vocab_size)
        if p.bad_word_ids:
            state.bad_words = read_bad_words(p.bad_word_ids, self._vocab_size, self._token_values)
        if state.needs & Needs.PENALTIES:
            state.penalty_slot = self.counts.claim(new.prompt_token_ids, outputs)
        return state

    def _token_values(self, values: dict[int, float]) -> TokenValues:
        ids = torch.tensor(list(values), dtype=torch.int64)
        numbers = torch.tensor(list(values.values()), dtype=torch.float32)
        return TokenValues(upload(ids, self._device), upload(numbers, self._device))
