"""Eagle3 and P-EAGLE: small draft models that read the target's hidden states."""

from __future__ import annotations

import torch

from atom.config import ConfigError, EngineConfig
from atom.kv_cache.base import KVCacheBuilder
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.models.eagle3.base import Eagle3Draft
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.eagle3_draft_builder import Eagle3DraftBuilder
from atom.spec_decode.proposers.base import DraftModel, Proposer, VerifiedStep
from atom.spec_decode.proposers.block_proposer import BlockModel, BlockProposer, PlaceRows, by_draft
from atom.spec_decode.proposers.chain_proposer import ChainModel, ChainProposer


class _Eagle3Model(DraftModel):
    """What drafts of both kinds share: the row at position t has the token at t + 1."""

    module: Eagle3Draft
    kv_depends_on_successor = True

    def __init__(self, draft: Eagle3Draft, reads_images: bool = False) -> None:
        self.module = draft
        self.vocab_size = draft.config.draft_vocab_size
        self.target_ids = draft.target_ids
        self.temperature_scale = draft.config.temperature_scale
        self.expected_acceptance = draft.config.expected_acceptance
        self.aux_layer_ids = draft.aux_layer_ids
        self.reads_images = reads_images
        self._head = draft.head

    def create_cache(
        self, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCacheBuilder:
        return Eagle3DraftBuilder(self.module, block_size, dtype, device)

    def compute_logits(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self._head.forward(states)

    def choose_tokens(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self._head.argmax(states, self.target_ids)


class Eagle3Chain(_Eagle3Model, ChainModel):
    """An Eagle3 draft as `ChainModel`: the same network makes every draft."""

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        return self.module.fuse(output.aux_hidden_states)

    def forward(
        self, index: int, rows: ModelInput, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = self.module(rows, hidden)
        return made

    def write_kv(self, rows: ModelInput, hidden: torch.Tensor) -> None:
        self.module.write_kv(rows, hidden)


class ParallelEagleModel(_Eagle3Model, BlockModel):
    """A P-EAGLE draft as `BlockModel`.

    A first pass over the step's rows is that of other Eagle3 drafts, and makes the first draft. All
    others come from a second one, over rows of masks behind the newest one, which see it and what
    is before it in the cache. Their keys and values are overwritten by the next step's first pass.
    """

    def __init__(self, draft: Eagle3Draft, reads_images: bool = False) -> None:
        super().__init__(draft, reads_images)
        assert draft.config.mask_token_id is not None
        self.mask_token_id = draft.config.mask_token_id
        device = draft.mask_hidden.device
        self._mask_token = torch.full((1,), self.mask_token_id, device=device)
        # Before any step: what a recorded one computes is there in its replays alone.
        with torch.inference_mode():
            self._mask_state = draft.fuse_mask()

    def write_kv(self, step: VerifiedStep) -> None:
        self.module.write_kv(*self._first_pass(step))

    def compute_states(self, step: VerifiedStep, place: PlaceRows, num_drafts: int) -> torch.Tensor:
        states, _ = self.module(*self._first_pass(step))
        first: torch.Tensor = states[step.last_rows]
        if num_drafts == 1:
            return first[None]
        count = len(first)
        masks = step.next_token_ids.new_empty(count)
        masks.copy_(self._mask_token.expand(count))
        rows = place(step, masks, num_drafts - 1)
        hidden = self._mask_state.new_empty(len(rows.input_ids), len(self._mask_state))
        hidden.copy_(self._mask_state.expand_as(hidden))
        others, _ = self.module(rows, hidden)
        return torch.cat((first[None], by_draft(others, count)))

    def _first_pass(self, step: VerifiedStep) -> tuple[ModelInput, torch.Tensor]:
        """What it reads."""
        return step.successors, self.module.fuse(step.model_output.aux_hidden_states)


def create_eagle3(
    options: SpeculativeOptions, config: EngineConfig, target: DraftTarget
) -> Proposer:
    """A chain; one pass for a P-EAGLE draft, which has a token for masks.

    Raises:
        ConfigError: when the draft cannot read the embeddings of images, and is told to.
    """
    assert options.model is not None
    draft, images = load_draft(options.model, target), options.image_embeddings
    if images:
        _check_images(draft, target)
    if draft.config.mask_token_id is None:
        return ChainProposer.create(Eagle3Chain(draft, images), options, config, target.context)
    model = ParallelEagleModel(draft, images)
    return BlockProposer.create(model, options, config, target.context)


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
