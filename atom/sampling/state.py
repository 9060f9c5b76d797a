"""What the runner remembers of each sequence in order to sample it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atom.batch import NewSequence
from atom.model_ops.metadata import SamplingMetadata
from atom.sampling_params import SamplingParams
from atom.structured_output.base import TokenMask
from atom.structured_output.cache import GrammarCache
from atom.structured_output.state import GrammarState


@dataclass
class SequenceState:
    """One live sequence.

    `output_token_ids` grows with every sampled token, and the grammar goes on with it.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    grammar: GrammarState | None = None

    def extend(self, token_ids: list[int]) -> int:
        """Take in sampled tokens; how many of them the grammar admits."""
        self.output_token_ids += token_ids
        return len(token_ids) if self.grammar is None else self.grammar.advance(token_ids)

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1)


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits to sample: a sequence and the drafts assumed to precede the row."""

    state: SequenceState
    drafts: Sequence[int] = ()

    @property
    def num_outputs(self) -> int:
        return len(self.state.output_token_ids) + len(self.drafts)

    @property
    def position(self) -> int:
        """Where the sampled token will sit in its sequence."""
        return len(self.state.prompt_token_ids) + self.num_outputs


class SamplingStates:
    """All live sequences of a runner, and the sampling metadata of any rows of theirs."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        device: torch.device,
        grammars: GrammarCache,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = device
        self._grammars = grammars
        self._states: dict[str, SequenceState] = {}

    def __getitem__(self, sequence_id: str) -> SequenceState:
        return self._states[sequence_id]

    def update(self, new: Iterable[NewSequence], finished_ids: Iterable[str]) -> None:
        """Forget `finished_ids`, then learn `new`."""
        for sequence_id in finished_ids:
            self._states.pop(sequence_id, None)
        for s in new:
            self._states[s.id] = SequenceState(
                s.params,
                s.seed,
                s.prompt_token_ids,
                list(s.output_token_ids),
                self._grammar_state(s),
            )

    def build_metadata(self, rows: Sequence[SamplingRow]) -> SamplingMetadata:
        """Sampling tensors for `rows`; what no row uses stays None."""
        params = [row.state.params for row in rows]
        logprobs = [p.logprobs for p in params if p.logprobs is not None]
        mask = self._grammar_mask(rows)
        fields: dict[str, torch.Tensor | None] = {
            "logit_bias": self._logit_bias(params),
            "banned": self._banned(rows, mask),
        }
        if mask is not None:
            fields |= self._grammar(rows, mask)
        if any(row.state.has_penalties for row in rows):
            fields |= self._penalties(rows)
        if not all(p.is_greedy for p in params):
            fields |= self._randomness(rows)
        return SamplingMetadata(**fields, num_logprobs=max(logprobs) if logprobs else None)

    def _randomness(self, rows: Sequence[SamplingRow]) -> dict[str, torch.Tensor | None]:
        params = [row.state.params for row in rows]
        top_k = [p.top_k if p.top_k > 0 else self._vocab_size for p in params]
        return {
            "temperature": self._floats([0 if p.is_greedy else p.temperature for p in params]),
            "seeds": self._integers([row.state.seed for row in rows]),
            "positions": self._integers([row.position for row in rows]),
            "top_k": self._integers(top_k).int() if min(top_k) < self._vocab_size else None,
            "top_p": self._optional([p.top_p for p in params], 1.0),
            "min_p": self._optional([p.min_p for p in params], 0.0),
        }

    def _penalties(self, rows: Sequence[SamplingRow]) -> dict[str, torch.Tensor | None]:
        params = [row.state.params for row in rows]
        counts = torch.zeros(len(rows), self._vocab_size, dtype=torch.int32)
        prompt_mask = torch.zeros(len(rows), self._vocab_size, dtype=torch.bool)
        for i, row in enumerate(rows):
            if not row.state.has_penalties:
                continue
            outputs = torch.tensor([*row.state.output_token_ids, *row.drafts], dtype=torch.int64)
            counts[i].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
            prompt_mask[i, torch.tensor(row.state.prompt_token_ids)] = True
        return {
            "presence": self._floats([p.presence_penalty for p in params]),
            "frequency": self._floats([p.frequency_penalty for p in params]),
            "repetition": self._floats([p.repetition_penalty for p in params]),
            "output_counts": counts.to(self._device),
            "prompt_mask": prompt_mask.to(self._device),
        }

    def _logit_bias(self, params: Sequence[SamplingParams]) -> torch.Tensor | None:
        if not any(p.logit_bias for p in params):
            return None
        bias = torch.zeros(len(params), self._vocab_size)
        for i, p in enumerate(params):
            for token_id, value in (p.logit_bias or {}).items():
                bias[i, token_id] = value
        return bias.to(self._device)

    def _grammar_state(self, new: NewSequence) -> GrammarState | None:
        """The state behind the outputs of a sequence, which a resumed one has already."""
        wanted = new.params.structured_output
        if wanted is None:
            return None
        state = GrammarState(self._grammars.get(wanted).create_matcher())
        state.advance(new.output_token_ids)
        return state

    def _grammar_mask(self, rows: Sequence[SamplingRow]) -> TokenMask | None:
        """What grammars allow at each row; the rows of a sequence follow one another."""
        if all(row.state.grammar is None for row in rows):
            return None
        mask: TokenMask = np.full((len(rows), -(-self._vocab_size // 32)), -1, dtype=np.int32)
        for i, row in enumerate(rows):
            if row.state.grammar is None or row.drafts:
                continue
            last = i
            while last + 1 < len(rows) and rows[last + 1].state is row.state:
                last += 1
            row.state.grammar.fill(mask, i, rows[last].drafts)
        return mask

    def _grammar(
        self, rows: Sequence[SamplingRow], mask: TokenMask
    ) -> dict[str, torch.Tensor | None]:
        limited = [i for i, row in enumerate(rows) if row.state.grammar is not None]
        if len(limited) == len(rows):
            return {"grammar_mask": torch.from_numpy(mask).to(self._device, non_blocking=True)}
        words = torch.from_numpy(mask[limited])
        return {
            "grammar_mask": words.to(self._device, non_blocking=True),
            "grammar_rows": self._integers(limited),
        }

    def _banned(self, rows: Sequence[SamplingRow], mask: TokenMask | None) -> torch.Tensor | None:
        """End tokens of sequences that have not reached min_tokens.

        Where a grammar allows nothing but end tokens they are not banned.
        """
        early = [i for i, row in enumerate(rows) if row.num_outputs < row.state.params.min_tokens]
        if not early:
            return None
        banned = torch.zeros(len(rows), self._vocab_size, dtype=torch.bool)
        for i in early:
            params = rows[i].state.params
            ends = () if params.ignore_eos else self._eos_token_ids
            token_ids = list({*ends, *(params.stop_token_ids or ())})
            if mask is None or _allows_others(mask[i], token_ids):
                banned[i, token_ids] = True
        return banned.to(self._device)

    def _optional(self, values: list[float], off: float) -> torch.Tensor | None:
        return None if all(v == off for v in values) else self._floats(values)

    def _floats(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _allows_others(allowed: TokenMask, token_ids: Iterable[int]) -> bool:
    """Whether a row of a mask allows more than these tokens."""
    others = allowed.view(np.uint32).copy()
    for token_id in token_ids:
        others[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return bool(others.any())
