"""Changes to logits before sampling: grammar masks, banned tokens, biases, penalties; and
the choice of tokens with them.

Rows that are not edited are neither read nor copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from atom.graphs.staging import StagingBuffer
from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.upload import upload
from atom.sampling.logit_constraints import ProcessedRow, TokenValues
from atom.sampling.ops import SamplingOps
from atom.sampling.rows import SamplingRows, SequenceState
from atom.sampling.token_counts import TokenCounts
from atom.sampling_params import EDITS, Needs
from atom.structured_output.base import TokenMask

MaskOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True)
class SampledRows:
    """The logits rows of one sequence: one more than its drafts.

    Attributes:
        row: the sequence's row in `SamplingRows`.
        first: its first row of the logits.
        drafts: its draft tokens; row j is sampled after the first j.
    """

    state: SequenceState
    row: int
    first: int
    drafts: Sequence[int]


@dataclass(frozen=True)
class Penalties:
    """Penalties for Q rows.

    Attributes:
        rows: [Q] int64, indices into the edited rows.
        slots: [Q] int64, rows of `TokenCounts`.
        presence, frequency, repetition: [Q, 1] float32.
        drafts: indices into Q [m] and draft tokens [m], int64, that count as generated; None
            without drafts.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    drafts: tuple[torch.Tensor, torch.Tensor] | None

    def apply(self, scores: torch.Tensor, counts: TokenCounts) -> None:
        seen, generated = counts.seen(self.slots, self.drafts)
        penalised = scores[self.rows]
        factor = torch.where(seen, self.repetition, 1.0)
        penalised = torch.where(penalised > 0, penalised / factor, penalised * factor)
        penalised -= self.presence * (generated > 0)
        penalised -= self.frequency * generated
        scores[self.rows] = penalised


@dataclass(frozen=True)
class LogitEdits:
    """Edits of P out of R rows of logits.

    Attributes:
        rows: [P] int64, indices into R.
        processed: rows that logits processors change.
        masks: bit mask [G, ceil(V / 32)] int32 and indices [G] int64 into P, of grammars and
            allowed tokens; None without.
        tokens: indices [n] int64 into P, and values to add at [m] tokens.
        penalties: None without.
    """

    rows: torch.Tensor
    processed: list[ProcessedRow]
    masks: tuple[torch.Tensor, torch.Tensor] | None
    tokens: list[tuple[torch.Tensor, TokenValues]]
    penalties: Penalties | None

    def apply(self, logits: torch.Tensor, mask_tokens: MaskOp, counts: TokenCounts) -> torch.Tensor:
        """The edited rows as [P, V] float32, from logits [R, V], which are not modified.

        Applied in order: logits processors, masks, banned tokens and biases, penalties.
        """
        scores = logits[self.rows].to(torch.float32)
        for each in self.processed:
            scores[each.row] = each.apply(scores[each.row])
        if self.masks is not None:
            mask_tokens(scores, *self.masks)
        for rows, added in self.tokens:
            scores.index_put_((rows[:, None], added.token_ids), added.values, accumulate=True)
        if self.penalties is not None:
            self.penalties.apply(scores, counts)
        return scores

    def choose(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        counts: TokenCounts,
        ops: SamplingOps,
    ) -> torch.Tensor:
        """As the op `choose_tokens`, with the edited rows in place of theirs.

        The logits are not modified, and there is no host sync on a GPU.
        """
        scores = self.apply(logits, ops.mask_tokens, counts)
        if scores.shape == logits.shape:
            token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        else:
            token_ids = ops.choose_tokens(logits, metadata)
        chosen = ops.choose_tokens(scores, metadata.select(self.rows))
        return token_ids.index_copy_(0, self.rows, chosen)


@dataclass
class _Listed:
    """The edits while they are collected; rows are indices into the edited rows."""

    rows: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    penalised: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    draft_rows: list[int] = field(default_factory=list)
    draft_tokens: list[int] = field(default_factory=list)
    masked_rows: list[int] = field(default_factory=list)
    processed: list[ProcessedRow] = field(default_factory=list)
    tokens: dict[TokenValues, list[int]] = field(default_factory=dict)


class EditsBuilder:
    """Collects the logit edits of a step's sampled sequences."""

    def __init__(self, rows: SamplingRows, vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._mask_width = -(-vocab_size // 32)
        self._device = device

    def build(
        self, sampled: Sequence[SampledRows], staging: StagingBuffer
    ) -> Callable[[], LogitEdits] | None:
        """Stage the edits; returns a function that makes them after `staging.send`, or None without
        edits.

        Args:
            sampled: the sequences with `EDITS` among their `needs`.
        """
        listed = _Listed()
        masks: list[TokenMask] = []
        for s in sampled:
            self._list(s, listed, masks)
        if not listed.rows:
            return None
        rows = staging.put(np.array(listed.rows))
        tokens = [(staging.put(np.array(r)), own) for own, r in listed.tokens.items()]
        mask = self._upload_masks(masks, listed, staging)
        penalties = self._put_penalties(listed, staging)
        return lambda: LogitEdits(
            rows, listed.processed, mask, tokens, penalties() if penalties else None
        )

    def _list(self, s: SampledRows, listed: _Listed, masks: list[TokenMask]) -> None:
        state, count, first = s.state, len(s.drafts) + 1, len(listed.rows)
        edited_rows = list(range(first, first + count))
        mask = None
        if state.grammar is not None or state.allowed is not None:
            mask = np.full((count, self._mask_width), -1, dtype=np.int32)
            if state.grammar is not None:
                state.grammar.fill(mask, 0, s.drafts)
            if state.allowed is not None:
                mask &= state.allowed
            masks.append(mask)
            listed.masked_rows += edited_rows
        early = self._early(s, mask)
        if not early and state.needs & EDITS == Needs.MIN_TOKENS:
            return
        listed.rows += range(s.first, s.first + count)
        if early:
            assert state.bans is not None
            listed.tokens.setdefault(state.bans, []).extend(first + j for j in early)
        if state.bias is not None:
            listed.tokens.setdefault(state.bias, []).extend(edited_rows)
        for words in state.bad_words:
            if banned := words.rows(state.output_token_ids, s.drafts):
                listed.tokens.setdefault(words.bans, []).extend(first + j for j in banned)
        if state.params.logits_processors:
            listed.processed += _processed(s, first)
        if state.penalty_slot is not None:
            start = len(listed.penalised)
            listed.penalised += edited_rows
            listed.owners += [s.row] * count
            listed.slots += [state.penalty_slot] * count
            for j in range(1, count):
                listed.draft_rows += [start + j] * j
                listed.draft_tokens += s.drafts[:j]

    def _early(self, s: SampledRows, mask: TokenMask | None) -> list[int]:
        """The rows before `min_tokens` outputs, where end tokens are banned.

        Excludes rows where the mask allows nothing but end tokens.
        """
        missing = s.state.params.min_tokens - len(s.state.output_token_ids)
        if missing <= 0 or s.state.bans is None:
            if s.state.needs & Needs.MIN_TOKENS:
                s.state.needs &= ~Needs.MIN_TOKENS
                self._rows.needs[s.row] = int(s.state.needs)
            return []
        early = range(min(missing, len(s.drafts) + 1))
        if mask is None:
            return list(early)
        return [j for j in early if _allows_others(mask[j], s.state.end_ids)]

    def _upload_masks(
        self, masks: list[TokenMask], listed: _Listed, staging: StagingBuffer
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Grammar masks are large, so they are uploaded separately."""
        if not masks:
            return None
        words = torch.from_numpy(np.concatenate(masks))
        rows = staging.put(np.array(listed.masked_rows))
        return upload(words, self._device), rows

    def _put_penalties(
        self, listed: _Listed, staging: StagingBuffer
    ) -> Callable[[], Penalties] | None:
        if not listed.penalised:
            return None
        rows, slots, owners = (
            staging.put(np.array(numbers))
            for numbers in (listed.penalised, listed.slots, listed.owners)
        )
        drafts = None
        if listed.draft_rows:
            drafts = (
                staging.put(np.array(listed.draft_rows)),
                staging.put(np.array(listed.draft_tokens)),
            )
        return lambda: Penalties(rows, slots, *self._rows.penalties(owners), drafts)


def _processed(s: SampledRows, first: int) -> list[ProcessedRow]:
    """A sequence's rows for its logits processors; row j follows the first j drafts."""
    state, drafts = s.state, list(s.drafts)
    processors = state.params.logits_processors or []
    return [
        ProcessedRow(
            first + j,
            processors,
            list(state.prompt_token_ids),
            [*state.output_token_ids, *drafts[:j]],
        )
        for j in range(len(drafts) + 1)
    ]


def _allows_others(allowed: TokenMask, token_ids: Sequence[int]) -> bool:
    """Whether a mask row allows any token besides these."""
    others = allowed.view(np.uint32).copy()
    for token_id in token_ids:
        others[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
    return bool(others.any())
