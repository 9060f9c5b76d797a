"""Block drafters: DFlash, DFlash2 and DSpark."""

from __future__ import annotations

import torch

from atom.config import ConfigError, EngineConfig
from atom.model_loader.drafts.block import load_block_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.models.block_draft.draft import BlockDraft
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.proposers.base import Proposer, VerifiedStep
from atom.spec_decode.proposers.block_proposer import BlockModel, BlockProposer, PlaceRows, by_draft


class BlockDraftModel(BlockModel):
    """A block drafter as `BlockModel`.

    Its context is what the target computed. Rows of rejected drafts lie behind the newest token,
    where the block is written, and each block is overwritten by the next: neither is ever read as
    context. The block has as many rows as in training, however many drafts are asked for, so drafts
    do not depend on their number.
    """

    cache_prefix = "block_draft_"
    module: BlockDraft

    def __init__(self, draft: BlockDraft) -> None:
        config = draft.config
        self.module = draft
        self.vocab_size = config.draft_vocab_size
        self.target_ids = draft.target_ids
        self.temperature_scale = config.temperature_scale
        self.expected_acceptance = config.expected_acceptance
        self.num_slots = config.block_size
        self.aux_layer_ids = draft.aux_layer_ids
        self.mask_token_id = config.mask_token_id
        self.path = draft.path

    def write_kv(self, step: VerifiedStep) -> None:
        states = self.module.fuse(step.model_output.aux_hidden_states)
        model_input = step.model_input
        self.module.write_context(states, model_input.positions, model_input.attention)

    def compute_states(self, step: VerifiedStep, place: PlaceRows, num_drafts: int) -> torch.Tensor:
        self.write_kv(step)
        config, anchors = self.module.config, step.next_token_ids[step.last_rows]
        rows = place(step, anchors, config.block_size)
        states = self.module(rows.input_ids, rows.positions, rows.attention)
        first = 0 if config.samples_anchor else 1
        return by_draft(states, len(anchors))[first : first + num_drafts]

    def compute_logits(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self.module.compute_logits(states)

    def choose_tokens(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self.module.head.argmax(states, self.target_ids)

    def confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        return self.module.confidence(states, previous)


def create_block(
    options: SpeculativeOptions, config: EngineConfig, target: DraftTarget
) -> Proposer:
    """A proposer with a block drafter, of the kind that the method names.

    Raises:
        ConfigError: for more drafts than a block has.
    """
    assert options.model is not None
    draft = load_block_draft(options.model, target, options.method)
    if options.num_speculative_tokens > draft.config.max_drafts:
        raise ConfigError(
            f"num_speculative_tokens={options.num_speculative_tokens} is more than the "
            f"{draft.config.max_drafts} drafts that {options.model} makes of a block of "
            f"{draft.config.block_size}"
        )
    model, confident = BlockDraftModel(draft), options.adaptive
    return BlockProposer.create(model, options, config, target.context, confident=confident)
