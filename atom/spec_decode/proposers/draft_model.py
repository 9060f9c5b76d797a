"""A language model of its own drafts: smaller than the target, with the same or other tokens."""

from __future__ import annotations

import torch

from atom.config import EngineConfig
from atom.kv_cache.base import storage_dtype
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.model_loader.drafts.draft_model import load_draft_model
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.drafts.tokenizer import TokenMaps
from atom.model_ops.attention.metadata import AttentionMetadata, ImageRows, ModelInput, ModelOutput
from atom.models.base import CausalLM
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.proposers.base import Proposer, create_choice
from atom.spec_decode.proposers.chain_proposer import ChainProposer
from atom.stats import ExpectedAcceptance


class DraftModelChain:
    """A language model as `ChainModel`: it reads tokens, and nothing of the target.

    Args:
        maps: how its tokens and the target's correspond; None if their ids are the same.
    """

    reads_target = False
    reads_hidden_states = False
    reads_images = False
    aux_layer_ids: tuple[int, ...] = ()
    keeps_pace = False
    expected_acceptance: ExpectedAcceptance | None = None

    def __init__(self, model: CausalLM, maps: TokenMaps | None) -> None:
        self.module = model
        self.target_ids: torch.Tensor | None = None
        self._draft_ids: torch.Tensor | None = None
        if maps is not None:
            device = model.final_norm.weight.device
            self.target_ids = torch.tensor(maps.to_target, device=device)
            self._draft_ids = torch.tensor(maps.to_draft, device=device)

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        return output.hidden_states.new_empty(len(output.hidden_states), 0)

    def forward(
        self,
        index: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        images: ImageRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._draft_ids is not None:
            token_ids = self._draft_ids[token_ids]
        output: ModelOutput = self.module(ModelInput(token_ids, positions, metadata))
        return output.hidden_states, hidden

    def write_kv(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        images: ImageRows | None = None,
    ) -> None:
        self.forward(0, token_ids, hidden, positions, metadata)

    def compute_logits(self, index: int, states: torch.Tensor) -> torch.Tensor:
        return self.module.compute_logits(states)

    def choose_token(self, index: int, states: torch.Tensor) -> torch.Tensor:
        return self.module.output_head.argmax(states, self.target_ids)


def create_draft_model(
    options: SpeculativeOptions, config: EngineConfig, target: DraftTarget
) -> Proposer:
    """A chain of the draft model's tokens."""
    assert options.model is not None
    context = target.context
    model, maps = load_draft_model(options.model, target)
    chain = DraftModelChain(model, maps)
    block_size, storage = config.cache.block_size, storage_dtype(config.cache, context)
    return ChainProposer(
        chain,
        PagedCache(
            attention_layers(model), block_size, storage, context.device, prefix="draft_model_"
        ),
        options.num_speculative_tokens,
        block_size,
        context.max_model_len,
        context.ops.resolve("advance_drafts", context.dtype),
        create_choice(context, model.token_embedding.vocab_size, chain.target_ids),
    )
