"""The proposer protocol. "No speculation" is `NullProposer`, not a branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from atom.batch import ScheduledSequence
from atom.graphs.capture import GraphPlan
from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.metadata import ModelInput, ModelOutput


@dataclass(frozen=True)
class VerifiedStep:
    """A target step whose tokens are sampled, as a proposer needs to see it: on the device.

    S of the batch's B sequences were sampled; the others are in the middle of their prompts.

    Attributes:
        sequences: the B sequences.
        model_input, model_output: T rows, rejected drafts included.
        next_token_ids: [T] int64; the token after each row: known from the prompt, or sampled.
            Rows of rejected drafts hold anything: what they write is overwritten by the next
            step before it is read.
        last_rows: [S] int64; for each sampled sequence the row whose next token is its newest.
        sampled: [S] int64, their places in the batch; None when all are sampled.
    """

    sequences: Sequence[ScheduledSequence]
    model_input: ModelInput
    model_output: ModelOutput
    next_token_ids: torch.Tensor
    last_rows: torch.Tensor
    sampled: torch.Tensor | None


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
        reads_steps: whether it has anything to do; without it no `VerifiedStep` is made.
        kv_cache_builders: the proposer's own KV caches, sized with the target's.
    """

    lookahead: Lookahead
    draft_model: nn.Module | None
    aux_layer_ids: tuple[int, ...]
    kv_cache_builders: Sequence[KVCacheBuilder]
    reads_steps: bool

    def capture(self, plan: GraphPlan) -> None:
        """Replay from now on what can be captured; the KV cache is bound and stays."""
        ...

    def propose(self, step: VerifiedStep, num_drafts: int) -> torch.Tensor:
        """[S, num_drafts] int64 drafts. For 0 of them only its KV is kept complete."""
        ...


class NullProposer:
    """Proposes nothing: a lookup makes all the drafts, or there are none."""

    draft_model: nn.Module | None = None
    aux_layer_ids: tuple[int, ...] = ()
    kv_cache_builders: Sequence[KVCacheBuilder] = ()
    reads_steps = False

    def __init__(self, lookahead: Lookahead = NO_LOOKAHEAD) -> None:
        self.lookahead = lookahead

    def capture(self, plan: GraphPlan) -> None:
        """There is nothing to capture."""

    def propose(self, step: VerifiedStep, num_drafts: int) -> torch.Tensor:
        return step.next_token_ids.new_empty((len(step.last_rows), 0))
