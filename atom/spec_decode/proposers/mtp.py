"""Multi-token prediction: the target's own prediction layers draft."""

from __future__ import annotations

import torch

from atom.config import EngineConfig
from atom.kv_cache.base import storage_dtype
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.drafts.mtp import load_mtp
from atom.model_ops.attention.metadata import AttentionMetadata, ImageRows, ModelOutput
from atom.models.layers.mtp import PredictionLayers
from atom.options.speculative import SpeculativeOptions
from atom.spec_decode.proposers.base import Proposer, create_choice
from atom.spec_decode.proposers.chain_proposer import ChainProposer
from atom.stats import ExpectedAcceptance


class MTPChain:
    """Prediction layers as `ChainModel`: layer i modulo their number makes draft i.

    The first pass reads the target's last hidden states directly.
    """

    reads_target = True
    reads_hidden_states = True
    reads_images = True
    aux_layer_ids: tuple[int, ...] = ()
    keeps_pace = True
    expected_acceptance: ExpectedAcceptance | None = None
    target_ids: torch.Tensor | None = None

    def __init__(self, mtp: PredictionLayers) -> None:
        self.module = mtp
        self.write_kv = mtp.write_kv
        self.compute_logits = mtp.compute_logits
        self.choose_token = mtp.choose_token

    def read_target(self, output: ModelOutput) -> torch.Tensor:
        return output.hidden_states

    def forward(
        self,
        index: int,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        images: ImageRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.module(index, token_ids, hidden, positions, metadata, images)
        return states, states


def create_mtp(options: SpeculativeOptions, config: EngineConfig, target: DraftTarget) -> Proposer:
    """A chain of the target's own prediction layers."""
    context = target.context
    mtp = load_mtp(target.model, target.source, context, target.options)
    block_size, storage = config.cache.block_size, storage_dtype(config.cache, context)
    layers = attention_layers(mtp)
    return ChainProposer(
        MTPChain(mtp),
        PagedCache(layers, block_size, storage, context.device, prefix="mtp_"),
        options.num_speculative_tokens,
        block_size,
        context.max_model_len,
        context.ops.resolve("advance_drafts", context.dtype),
        create_choice(context, target.config.vocab_size),
    )
