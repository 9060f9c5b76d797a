"""Block drafters: DFlash, DFlash2 and DSpark."""

from __future__ import annotations

import torch

from atom.config import ConfigError, EngineConfig
from atom.kv_cache.base import storage_dtype
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.model_loader.drafts.block import load_block_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.models.block_draft.draft import BlockDraft
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.proposers.base import Proposer, VerifiedStep, create_choice
from atom.spec_decode.proposers.block_proposer import BlockProposer, BlockRows, by_draft


class BlockDraftModel:
    """A block drafter as `BlockModel`.

    Its context is what the target computed. Rows of rejected drafts lie behind the newest token,
    where the block is written, and each block is overwritten by the next: neither is ever read as
    context. The block has as many rows as in training, however many drafts are asked for, so drafts
    do not depend on their number.
    """

    kv_depends_on_successor = False
    reads_images = False  # its context is the target's hidden states alone

    def __init__(self, draft: BlockDraft) -> None:
        config = draft.config
        self.module = draft
        self.aux_layer_ids = draft.aux_layer_ids
        self.num_slots = config.block_size
        self.mask_token_id = config.mask_token_id
        self.expected_acceptance = config.expected_acceptance
        self.target_ids = draft.target_ids
        self.walks = draft.walks
        self.compute_logits = draft.compute_logits
        self.begin_path = draft.begin_path
        self.score = draft.score
        self.confidence = draft.confidence

    def write_kv(self, step: VerifiedStep) -> None:
        states = self.module.fuse(step.model_output.aux_hidden_states)
        model_input = step.model_input
        self.module.write_context(states, model_input.positions, model_input.attention)

    def compute_states(self, step: VerifiedStep, rows: BlockRows, num_drafts: int) -> torch.Tensor:
        self.write_kv(step)
        config, anchors = self.module.config, step.next_token_ids[step.last_rows]
        states = self.module(*rows.behind(step, anchors, config.block_size))
        first = 0 if config.samples_anchor else 1
        return by_draft(states, len(anchors))[first : first + num_drafts]

    def choose_tokens(self, states: torch.Tensor) -> torch.Tensor:
        return self.module.head.argmax(states, self.target_ids)


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
    block_size = config.cache.block_size
    context, storage = target.context, storage_dtype(config.cache, target.context)
    layers = attention_layers(draft)
    return BlockProposer(
        BlockDraftModel(draft),
        PagedCache(layers, block_size, storage, context.device, prefix="block_draft_"),
        options.num_speculative_tokens,
        block_size,
        context.max_model_len,
        context.ops.resolve("place_blocks", context.dtype),
        create_choice(
            context,
            draft.config.draft_vocab_size,
            draft.target_ids,
            draft.config.temperature_scale,
            confident=options.adaptive,
        ),
    )
