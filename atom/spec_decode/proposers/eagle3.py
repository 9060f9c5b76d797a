"""Eagle3 and P-EAGLE: small draft models that read the target's hidden states."""

from __future__ import annotations

from typing import Any

import torch

from atom.config import ConfigError, EngineConfig
from atom.kv_cache.base import storage_dtype
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_ops.attention.metadata import AttentionMetadata, ImageRows, ModelOutput
from atom.models.eagle3.base import Eagle3Draft
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.eagle3_draft_builder import Eagle3DraftBuilder
from atom.spec_decode.proposers.base import Proposer, VerifiedStep, create_choice
from atom.spec_decode.proposers.block_proposer import BlockProposer, BlockRows, by_draft
from atom.spec_decode.proposers.chain_proposer import ChainProposer


class Eagle3Chain:
    """An Eagle3 draft as `ChainModel`: the same network makes every draft."""

    reads_target = True
    reads_hidden_states = False
    keeps_pace = False

    def __init__(self, draft: Eagle3Draft, reads_images: bool = False) -> None:
        self.module = draft
        self.reads_images = reads_images
        self.aux_layer_ids = draft.aux_layer_ids
        self.expected_acceptance = draft.config.expected_acceptance
        self.target_ids = draft.target_ids
        self.write_kv = draft.write_kv
        self._head = draft.head

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        return self.module.fuse(output.aux_hidden_states)

    def forward(
        self,
        index: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        images: ImageRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor]
        made = self.module(token_ids, hidden, positions, metadata, images)
        return made

    def compute_logits(self, index: int, states: torch.Tensor) -> torch.Tensor:
        return self._head.forward(states)

    def choose_token(self, index: int, states: torch.Tensor) -> torch.Tensor:
        return self._head.argmax(states, self.target_ids)


class ParallelEagleModel:
    """A P-EAGLE draft as `BlockModel`.

    A first pass over the step's rows is that of other Eagle3 drafts, and makes the first draft. All
    others come from a second one, over rows of masks behind the newest one, which see it and what
    is before it in the cache. Their keys and values are overwritten by the next step's first pass.
    """

    kv_depends_on_successor = True
    num_slots = 0
    walks = False

    def __init__(self, draft: Eagle3Draft, reads_images: bool = False) -> None:
        assert draft.config.mask_token_id is not None
        self.module = draft
        self.reads_images = reads_images
        self.aux_layer_ids = draft.aux_layer_ids
        self.mask_token_id = draft.config.mask_token_id
        self.expected_acceptance = draft.config.expected_acceptance
        self.target_ids = draft.target_ids
        self.compute_logits = draft.compute_logits
        device = draft.mask_hidden.device
        self._mask_token = torch.full((1,), self.mask_token_id, device=device)
        # Before any step: what a recorded one computes is there in its replays alone.
        with torch.inference_mode():
            self._mask_state = draft.fuse_mask()

    def write_kv(self, step: VerifiedStep) -> None:
        self.module.write_kv(*self._rows_of(step))

    def compute_states(self, step: VerifiedStep, rows: BlockRows, num_drafts: int) -> torch.Tensor:
        states, _ = self.module(*self._rows_of(step))
        first: torch.Tensor = states[step.last_rows]
        if num_drafts == 1:
            return first[None]
        count = len(first)
        masks = step.next_token_ids.new_empty(count)
        masks.copy_(self._mask_token.expand(count))
        token_ids, positions, metadata = rows.behind(step, masks, num_drafts - 1)
        hidden = self._mask_state.new_empty(len(token_ids), len(self._mask_state))
        hidden.copy_(self._mask_state.expand_as(hidden))
        others, _ = self.module(token_ids, hidden, positions, metadata)
        return torch.cat((first[None], by_draft(others, count)))

    def choose_tokens(self, states: torch.Tensor) -> torch.Tensor:
        return self.module.head.argmax(states, self.target_ids)

    def begin_path(self, states: torch.Tensor) -> None:
        return None

    def score(
        self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor, carried: Any
    ) -> tuple[torch.Tensor, Any]:
        return logits, None

    def confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        return None

    def _rows_of(
        self, step: VerifiedStep
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, ImageRows | None]:
        """What the first pass reads: the row at position t has the token at t + 1."""
        hidden = self.module.fuse(step.model_output.aux_hidden_states)
        model_input = step.model_input
        where = model_input.positions, model_input.attention, model_input.next_images
        return step.next_token_ids, hidden, *where


def create_eagle3(
    options: SpeculativeOptions, config: EngineConfig, target: DraftTarget
) -> Proposer:
    """A chain; one pass for a P-EAGLE draft, which has a token for masks.

    Raises:
        ConfigError: when the draft cannot read the embeddings of images, and is told to.
    """
    assert options.model is not None
    context = target.context
    draft = load_draft(options.model, target)
    if options.image_embeddings:
        _check_images(draft, target)
    storage = storage_dtype(config.cache, context)
    builder = Eagle3DraftBuilder(draft, config.cache.block_size, storage, context.device)
    size, scale = draft.config.draft_vocab_size, draft.config.temperature_scale
    choice = create_choice(context, size, draft.target_ids, scale)
    if draft.config.mask_token_id is not None:
        return BlockProposer(
            ParallelEagleModel(draft, options.image_embeddings),
            builder,
            options.num_speculative_tokens,
            config.cache.block_size,
            context.max_model_len,
            context.ops.resolve("place_blocks", context.dtype),
            choice,
        )
    return ChainProposer(
        Eagle3Chain(draft, options.image_embeddings),
        builder,
        options.num_speculative_tokens,
        config.cache.block_size,
        context.max_model_len,
        context.ops.resolve("advance_drafts", context.dtype),
        choice,
    )


def _check_images(draft: Eagle3Draft, target: DraftTarget) -> None:
    """Raises ConfigError when there are no embeddings of images, or the draft has no place for
    them.
    """
    if target.model.image_encoder is None:
        raise ConfigError(
            f"draft_image_embeddings has no effect: {target.source.name} reads no images"
        )
    size, own = target.config.hidden_size, draft.config.hidden_size
    if own != size:
        raise ConfigError(
            f"draft_image_embeddings: the draft is {own} wide, and embeddings of images are "
            f"{size}; leave it out"
        )
