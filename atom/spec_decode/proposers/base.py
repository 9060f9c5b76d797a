"""The proposer protocol, and the choice of drafts. "No speculation" is `NullProposer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from atom.batch import NO_LOOKAHEAD, Lookahead, ScheduledSequence
from atom.graphs.staging import ReadInPlace
from atom.kv_cache.base import KVCacheBuilder
from atom.model_ops.attention.metadata import ModelInput, ModelOutput, SamplingMetadata
from atom.model_ops.kernels.torch.draft_choice import choose_drafts
from atom.model_ops.layer_context import LayerContext


class Guide(Protocol):
    """What drafts are allowed, known on the host from one token to the next."""

    def restrict(self, logits: torch.Tensor, target_ids: torch.Tensor | None) -> None:
        """Write -inf for tokens that are not allowed, unless none is.

        Args:
            logits: [S, V_draft] of the next draft, one row for each sampled sequence.
            target_ids: [V_draft] int64, the token ids; None if they are the indices.
        """
        ...

    def take(self, token_ids: torch.Tensor) -> None:
        """Write the drafts that follow from those that were chosen, [S] int64."""
        ...


@dataclass(frozen=True)
class VerifiedStep:
    """A sampled and verified target step on the device, as input of a proposer.

    S of the batch's B sequences were sampled; the others are still in their prompts.

    Attributes:
        sequences: the B sequences.
        model_input, model_output: T rows, including rejected drafts.
        next_token_ids: [T] int64; the token after each row, from the prompt or sampled. Undefined
            for rows of rejected drafts, whose KV the next step overwrites before it is read.
        last_rows: [S] int64; for each sampled sequence, the row from which its newest token was
            sampled.
        sampled: [S] int64, batch indices of the sampled sequences; None when all are sampled.
        draft_sampling: sampling options of the S sampled sequences, [S] each and without positions:
            a draft is the winner of the race in which the target samples its token. None when all
            are greedy. The first draft's position is `positions[last_rows] + 2`.
        guide: drafts must follow it, where it is known before them; else None.
    """

    sequences: Sequence[ScheduledSequence]
    model_input: ModelInput
    model_output: ModelOutput
    next_token_ids: torch.Tensor
    last_rows: torch.Tensor
    sampled: torch.Tensor | None
    draft_sampling: SamplingMetadata | None = None
    guide: Guide | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All that a proposer reads, but for a guide's."""
        rows = self.model_input.input_ids, self.model_input.positions, self.next_token_ids
        output = self.model_output.hidden_states, *self.model_output.aux_hidden_states
        draft_sampling = () if self.draft_sampling is None else self.draft_sampling.tensors
        return *rows, *self.model_input.attention.tensors, *output, self.last_rows, *draft_sampling


@dataclass(frozen=True)
class Proposal(ReadInPlace):
    """Drafts of S sequences.

    Attributes:
        token_ids: [S, n] int64.
        confidences: [S, n] float32, the draft's own probability of each of its tokens, after
            temperature and filters; None if it has none or nobody asked.
    """

    token_ids: torch.Tensor
    confidences: torch.Tensor | None = None

    @classmethod
    def empty(cls, step: VerifiedStep) -> Proposal:
        """No drafts."""
        return cls(step.next_token_ids.new_empty((len(step.last_rows), 0)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that there are."""
        return [t for t in (self.token_ids, self.confidences) if t is not None]


@dataclass(frozen=True)
class Chosen:
    """One draft of each of S sequences.

    Attributes:
        token_ids: [S] int64, of the target.
        confidences: [S] float32, as in `Proposal`; None unless asked for.
    """

    token_ids: torch.Tensor
    confidences: torch.Tensor | None = None


def together(drafts: Sequence[Chosen]) -> Proposal:
    """The drafts of every position, at least one, as one proposal."""
    token_ids = [chosen.token_ids[:, None] for chosen in drafts]
    confidences = [c.confidences[:, None] for c in drafts if c.confidences is not None]
    if len(drafts) == 1:
        return Proposal(*token_ids, *confidences)
    return Proposal(
        torch.cat(token_ids, dim=1), torch.cat(confidences, dim=1) if confidences else None
    )


class Proposer(Protocol):
    """Proposes drafts for the sampled sequences of a batch.

    Attributes:
        lookahead: what the scheduler needs to know.
        draft_model: has the attention layers to bind the KV cache to; None without a model, and
            then `propose` is host code that no replay stands for.
        aux_layer_ids: target layers (boundary ids) whose hidden states the proposer reads.
        reads_steps: whether it reads a `VerifiedStep`; otherwise none is built.
        reads_hidden_states: whether it reads `ModelOutput.hidden_states` of rows that are not
            sampled, too.
        reads_images: whether it reads `ModelInput.next_images`.
        kv_cache_builders: the proposer's own KV caches, sized together with the target's.
    """

    lookahead: Lookahead
    draft_model: nn.Module | None
    aux_layer_ids: tuple[int, ...]
    kv_cache_builders: Sequence[KVCacheBuilder]
    reads_steps: bool
    reads_hidden_states: bool
    reads_images: bool

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        """`num_drafts` drafts of each sampled sequence. With 0 drafts it only writes its KV.

        A graph may capture it, so without a guide it asks the device for nothing.
        """
        ...


class NullProposer:
    """Proposes no drafts: all come from a lookup, or there are none."""

    draft_model: nn.Module | None = None
    aux_layer_ids: tuple[int, ...] = ()
    kv_cache_builders: Sequence[KVCacheBuilder] = ()
    reads_steps = False
    reads_hidden_states = False
    reads_images = False

    def __init__(self, lookahead: Lookahead = NO_LOOKAHEAD) -> None:
        self.lookahead = lookahead

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        return Proposal.empty(step)


# The op `choose_drafts`.
ChooseOp = Callable[
    [torch.Tensor, SamplingMetadata, torch.Tensor | None, float, int, bool],
    tuple[torch.Tensor, torch.Tensor | None],
]
_ALL_GREEDY = SamplingMetadata()


class DraftSampler:
    """Chooses drafts from a draft model's logits: those that the target is likely to sample.

    The target's sample is the winner of a race with noise that is known before: a function of the
    request's seed, the position and the token. A draft wins the same race among the draft's logits.
    Verification keeps a draft if it is the sample, so the race can only raise its chance.

    Attributes:
        token_ids: [V_draft] int32, the target's token of each logit; None if these are the same.
        temperature_scale: of the requests' temperatures, at which drafts race.
        confident: whether confidences are computed.
    """

    def __init__(
        self,
        token_ids: torch.Tensor | None = None,
        temperature_scale: float = 1.0,
        *,
        op: ChooseOp = choose_drafts,
        confident: bool = False,
    ) -> None:
        self.confident = confident
        self.token_ids = None if token_ids is None else token_ids.int()
        self.temperature_scale = temperature_scale
        self._op = op

    def choose(
        self,
        logits: torch.Tensor,
        draft_sampling: SamplingMetadata | None,
        positions: torch.Tensor,
        guide: Guide | None = None,
        ahead: int = 2,
    ) -> Chosen:
        """One draft for each row of logits [S, V_draft].

        Args:
            logits: a guide writes to them.
            draft_sampling, guide: as in `VerifiedStep`.
            positions: [S] int64; the drafts' positions are `ahead` more.
        """
        options = (
            _ALL_GREEDY if draft_sampling is None else replace(draft_sampling, positions=positions)
        )
        if guide is not None:
            guide.restrict(logits, self.token_ids)
        token_ids, scale = self.token_ids, self.temperature_scale
        chosen = Chosen(*self._op(logits, options, token_ids, scale, ahead, self.confident))
        if guide is not None:
            guide.take(chosen.token_ids)
        return chosen


def create_choice(
    context: LayerContext,
    vocab_size: int,
    token_ids: torch.Tensor | None = None,
    temperature_scale: float = 1.0,
    *,
    confident: bool = False,
) -> DraftSampler:
    """The choice of drafts from logits [S, vocab_size], with this platform's op."""
    op = context.ops.resolve("choose_drafts", torch.float32, vocab_size=vocab_size)
    return DraftSampler(token_ids, temperature_scale, op=op, confident=confident)
