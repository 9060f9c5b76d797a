"""Multi-token prediction: the target's own prediction layers draft."""

from __future__ import annotations

import torch

from atom.config import EngineConfig
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.drafts.mtp import load_mtp
from atom.model_ops.attention.metadata import ModelInput, ModelOutput
from atom.models.layers.mtp import PredictionLayers
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.proposers.base import Proposer
from atom.spec_decode.proposers.chain_proposer import ChainModel, ChainProposer


class MTPChain(ChainModel):
    """Prediction layers as `ChainModel`: layer i modulo their number makes draft i.

    The first pass reads the target's last hidden states directly.
    """

    cache_prefix = "mtp_"
    module: PredictionLayers
    kv_depends_on_successor = True
    reads_hidden_states = True
    reads_images = True
    keeps_pace = True

    def __init__(self, mtp: PredictionLayers, vocab_size: int) -> None:
        self.module = mtp
        self.vocab_size = vocab_size

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        return output.hidden_states

    def forward(
        self, index: int, rows: ModelInput, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.module(index, rows, hidden)
        return states, states

    def write_kv(self, rows: ModelInput, hidden: torch.Tensor) -> None:
        self.module.write_kv(rows, hidden)

    def compute_logits(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self.module.compute_logits(index, states)

    def choose_tokens(self, states: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self.module.choose_token(index, states)


def create_mtp(options: SpeculativeOptions, config: EngineConfig, target: DraftTarget) -> Proposer:
    """A chain of the target's own prediction layers."""
    mtp = load_mtp(target.model, target.source, target.context, target.options)
    model = MTPChain(mtp, target.config.vocab_size)
    return ChainProposer.create(model, options, config, target.context)
