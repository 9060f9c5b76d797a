"""Proposers, the draft models that they run, and the choice of drafts.

"No speculation" is `NullProposer`. A proposer with a model is a `ModelProposer` of a `DraftModel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from atom.batch import NO_LOOKAHEAD, Lookahead, ScheduledSequence
from atom.config import EngineConfig
from atom.graphs.staging import ReadInPlace
from atom.kv_cache.base import KVCacheBuilder, storage_dtype
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.model_ops.attention.metadata import (
    AttentionMetadata,
    ModelInput,
    ModelOutput,
    SamplingMetadata,
)
from atom.model_ops.kernels.torch.draft_choice import choose_drafts
from atom.model_ops.layer_context import LayerContext
from atom.options.speculative import SpeculativeOptions
from atom.stats import ExpectedAcceptance


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
    def successors(self) -> ModelInput:
        """The T rows, each with the token after its position."""
        given = self.model_input
        return ModelInput(
            self.next_token_ids, given.positions, given.attention, images=given.next_images
        )

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
    def empty(cls, step: VerifiedStep, num_drafts: int = 0) -> Proposal:
        """No drafts of the sampled sequences, or so many of none."""
        return cls(step.next_token_ids.new_empty((len(step.last_rows), num_drafts)))

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
    draft_model: nn.Module | None = None
    aux_layer_ids: tuple[int, ...] = ()
    reads_steps: bool = False
    reads_hidden_states: bool = False
    reads_images: bool = False
    kv_cache_builders: Sequence[KVCacheBuilder] = ()

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        """`num_drafts` drafts of each sampled sequence. With 0 drafts it only writes its KV.

        A graph may capture it, so without a guide it asks the device for nothing.
        """
        ...


class NullProposer(Proposer):
    """Proposes no drafts: all come from a lookup, or there are none."""

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


class DraftModel(ABC):
    """A model that drafts, as proposers and the engine see it.

    Attributes:
        module: holds the attention layers.
        cache_prefix: of the names of its KV cache's tensors.
        vocab_size: V_draft, the number of its logits.
        target_ids: [V_draft] int64, the target's token of each logit; None if these are the same.
        temperature_scale: as in `DraftSampler`.
        kv_depends_on_successor, expected_acceptance, num_slots: as in `Lookahead`.
        mask_token_id: what rows read where there is no token yet.
        aux_layer_ids, reads_hidden_states, reads_images: as in `Proposer`.
    """

    module: nn.Module
    cache_prefix: ClassVar[str]
    vocab_size: int
    target_ids: torch.Tensor | None = None
    temperature_scale: float = 1.0
    kv_depends_on_successor: bool = False
    expected_acceptance: ExpectedAcceptance | None = None
    num_slots: int = 0
    mask_token_id: int = 0
    aux_layer_ids: tuple[int, ...] = ()
    reads_hidden_states: bool = False
    reads_images: bool = False

    def create_cache(
        self, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCacheBuilder:
        """Its own KV cache, with the target's blocks."""
        layers = attention_layers(self.module)
        return PagedCache(layers, block_size, dtype, device, prefix=self.cache_prefix)

    @abstractmethod
    def compute_logits(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        """[R, hidden] of drafts `index` of their sequences -> [R, V_draft] float32."""

    @abstractmethod
    def choose_tokens(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        """[R, hidden] -> [R] int64, the target's ids of the most likely tokens."""


@dataclass(frozen=True)
class NewestRows:
    """The rows of S sequences behind which drafts are placed in the cache.

    Attributes:
        positions: [S] int64; the newest tokens, whose KV is not computed, are one further.
        block_tables: [S, max_blocks] int32.
        block_counts: [S] int32; blocks of each sequence.
        max_context_len: upper bound of the context lengths once drafts are placed.
    """

    positions: torch.Tensor
    block_tables: torch.Tensor
    block_counts: torch.Tensor
    max_context_len: int


# The op `place_drafts`.
PlaceOp = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]
_Model = TypeVar("_Model", bound=DraftModel)


class ModelProposer(Proposer, Generic[_Model]):
    """Proposes up to `num_speculative_tokens` drafts of a model, beside the target's KV cache.

    Args:
        choice: of drafts from logits.
    """

    reads_steps = True

    def __init__(
        self,
        model: _Model,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
        place: PlaceOp,
        choice: DraftSampler,
    ) -> None:
        self.lookahead = Lookahead(
            num_speculative_tokens,
            kv_depends_on_successor=model.kv_depends_on_successor,
            expected_acceptance=model.expected_acceptance,
            num_slots=max(model.num_slots, num_speculative_tokens),
        )
        self.draft_model = model.module
        self.aux_layer_ids = model.aux_layer_ids
        self.reads_hidden_states = model.reads_hidden_states
        self.reads_images = model.reads_images
        self.kv_cache_builders = (kv_cache_builder,)
        self._model = model
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._place = place
        self._choice = choice

    @classmethod
    def create(
        cls,
        model: _Model,
        options: SpeculativeOptions,
        config: EngineConfig,
        context: LayerContext,
        *,
        confident: bool = False,
    ) -> Proposer:
        """One with this platform's ops.

        Args:
            context: the target's.
            confident: as in `DraftSampler`.
        """
        size, storage = config.cache.block_size, storage_dtype(config.cache, context)
        choose = context.ops.resolve("choose_drafts", torch.float32, vocab_size=model.vocab_size)
        scale = model.temperature_scale
        return cls(
            model,
            model.create_cache(size, storage, context.device),
            options.num_speculative_tokens,
            size,
            context.max_model_len,
            context.ops.resolve("place_drafts", context.dtype),
            DraftSampler(model.target_ids, scale, op=choose, confident=confident),
        )

    def _newest_rows(
        self, step: VerifiedStep, positions: torch.Tensor, num_behind: int
    ) -> NewestRows:
        """Those of the sampled sequences.

        Args:
            positions: [S], of `step.last_rows`.
            num_behind: most rows that will be behind one of them.
        """
        metadata = step.model_input.attention
        tables, counts = metadata.block_tables, metadata.block_counts
        if step.sampled is not None:
            tables, counts = tables[step.sampled], counts[step.sampled]
        longest = min(metadata.max_context_len + num_behind, self._max_model_len)
        capacity = tables.shape[1] * self._block_size
        return NewestRows(positions, tables, counts, min(longest, capacity))

    def _rows_behind(
        self, newest: NewestRows, token_ids: torch.Tensor, distance: int, num_rows: int
    ) -> ModelInput:
        """`num_rows` rows of each sequence, the first one `distance` positions behind its newest.

        Beyond its blocks or `max_model_len`, a sequence stays at its last position with slot -1:
        the scheduler never verifies those drafts. Of token c and 3 rows, 1 behind position 1:
        (c, 2) (mask, 3) (mask, 4), as (token, position).

        Args:
            token_ids: [S] int64, of the first rows.
        """
        token_ids, positions, slots, context_lens, starts = self._place(
            token_ids,
            newest.positions,
            newest.block_tables,
            newest.block_counts,
            distance,
            num_rows,
            self._model.mask_token_id,
            self._block_size,
            self._max_model_len,
        )
        metadata = AttentionMetadata(
            slot_mapping=slots,
            block_tables=newest.block_tables,
            block_counts=newest.block_counts,
            context_lens=context_lens,
            cu_seqlens_q=starts,
            max_seqlen_q=num_rows,
            max_context_len=newest.max_context_len,
            query_lens_cpu=(num_rows,) * len(newest.block_tables),
            context_lens_cpu=None,
        )
        return ModelInput(token_ids, positions, metadata)
