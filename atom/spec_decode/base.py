"""The proposer protocol. "No speculation" is `NullProposer`, not a branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from atom.graphs.capture import GraphPlan
from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.metadata import ModelInput, ModelOutput


@dataclass(frozen=True)
class Verification:
    """What became of one sequence's drafts in a step.

    Attributes:
        source: who had been asked for them; None when nobody was.
        num_drafts, num_accepted: verified, and kept.
    """

    source: str | None
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True)
class VerifiedStep:
    """A finished target step, as a drafter needs to see it.

    S of the batch's B sequences were sampled; the others are in the middle of their prompts.

    Attributes:
        model_input, model_output: T rows, rejected drafts included.
        next_token_ids: [T] int64; the token after each row: known from the prompt, or sampled.
            Rows of rejected drafts hold anything: what they write is overwritten by the next
            step before it is read.
        sequence_ids: of all B sequences, in the order of the batch.
        last_rows: [S] int64; for each sampled sequence the row whose next token is its newest.
        sequence_indices: for each sampled sequence its place in the batch.
        histories: for each sampled sequence its prompt and its outputs, the newest included;
            the lists are the sequence's own and grow.
        verifications: for each sampled sequence.
        num_drafts: drafts wanted for each of them. With 0 a proposer only keeps its KV complete.
        started: seconds, `time.perf_counter()`, when the step began; its tokens are on the host
            by now.
    """

    model_input: ModelInput
    model_output: ModelOutput
    next_token_ids: torch.Tensor
    sequence_ids: Sequence[str]
    last_rows: torch.Tensor
    sequence_indices: Sequence[int]
    histories: Sequence[tuple[Sequence[int], Sequence[int]]]
    verifications: Sequence[Verification]
    num_drafts: int
    started: float

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computed its newest token and drafts, and nothing else."""
        rows = sum(1 + v.num_drafts for v in self.verifications)
        everyone = len(self.sequence_ids) == len(self.sequence_indices)
        return everyone and rows == self.model_input.input_ids.shape[0]


@dataclass(frozen=True)
class Lookahead:
    """What the scheduler must know of a proposer.

    Attributes:
        num_tokens: most drafts per step; that many KV slots are kept ready past the known tokens.
        kv_depends_on_successor: whether the proposer's KV at a position depends on the token
            after it, so that a cached block is only the same where the next token is.
    """

    num_tokens: int = 0
    kv_depends_on_successor: bool = False


NO_LOOKAHEAD = Lookahead()


class Proposer(Protocol):
    """Guesses the next tokens of every sampled sequence of a batch.

    Attributes:
        lookahead: what the scheduler must know.
        draft_model: holds the attention layers that the KV cache is bound to; None without one.
        aux_layer_ids: target layers (boundary ids) whose hidden states the proposer reads.
        kv_cache_builders: the proposer's own KV caches, sized with the target's.
    """

    lookahead: Lookahead
    draft_model: nn.Module | None
    aux_layer_ids: tuple[int, ...]
    kv_cache_builders: Sequence[KVCacheBuilder]

    def capture(self, plan: GraphPlan) -> None:
        """Replay from now on what can be captured; the KV cache is bound and stays."""
        ...

    def propose(self, step: VerifiedStep) -> torch.Tensor:
        """[S, num_drafts] int64 drafts, padded with `NO_DRAFT` where there are fewer."""
        ...


class NullProposer:
    """Proposes nothing: every step verifies one row per sequence."""

    lookahead = NO_LOOKAHEAD
    draft_model: nn.Module | None = None
    aux_layer_ids: tuple[int, ...] = ()
    kv_cache_builders: Sequence[KVCacheBuilder] = ()

    def capture(self, plan: GraphPlan) -> None:
        """There is nothing to capture."""

    def propose(self, step: VerifiedStep) -> torch.Tensor:
        return step.next_token_ids.new_empty((len(step.sequence_indices), 0))
