"""A language model of its own drafts: smaller than the target, with the same or other tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from atom.config import EngineConfig
from atom.model_loader.drafts.draft_model import load_draft_model
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.drafts.tokenizer import TokenMaps
from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.models.base import CausalLM
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.proposers.base import Proposer
from atom.spec_decode.proposers.chain_proposer import ChainModel, ChainProposer


class DraftModelChain(ChainModel):
    """A language model as `ChainModel`: it reads tokens, and nothing of the target.

    Args:
        maps: how its tokens and the target's correspond; None if their ids are the same.
    """

    cache_prefix = "draft_model_"
    module: CausalLM

    def __init__(self, model: CausalLM, maps: TokenMaps | None) -> None:
        self.module = model
        self.vocab_size = model.token_embedding.vocab_size
        self._draft_ids: torch.Tensor | None = None
        if maps is not None:
            device = model.final_norm.weight.device
            self.target_ids = torch.tensor(maps.to_target, device=device)
            self._draft_ids = torch.tensor(maps.to_draft, device=device)

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        return output.hidden_states.new_empty(len(output.hidden_states), 0)

    def forward(
        self, index: int, rows: ModelInput, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._draft_ids is not None:
            rows = replace(rows, input_ids=self._draft_ids[rows.input_ids])
        output: ModelOutput = self.module(rows)
        return output.hidden_states, hidden

    def write_kv(self, rows: ModelInput, hidden: torch.Tensor) -> None:
        self.forward(0, rows, hidden)

    def compute_logits(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self.module.compute_logits(states)

    def choose_tokens(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self.module.output_head.argmax(states, self.target_ids)


def create_draft_model(
    options: SpeculativeOptions, config: EngineConfig, target: DraftTarget
) -> Proposer:
    """A chain of the draft model's tokens."""
    assert options.model is not None
    chain = DraftModelChain(*load_draft_model(options.model, target))
    return ChainProposer.create(chain, options, config, target.context)
