"""The kinds of drafts that are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from atom.models.block_draft.config import BlockDraftConfig
from atom.models.eagle3.config import Eagle3Config
from atom_train.draft_config import make_block_config, make_draft_config
from atom_train.networks.block_network import TrainingBlockDraft
from atom_train.networks.initialise import LinearGuess, initialise
from atom_train.networks.initialise_block import initialise_block
from atom_train.networks.layers import TrainedDraft
from atom_train.networks.network import TrainingDraft
from atom_train.target_parts import TargetParts


class DraftKind(Protocol):
    """What is asked for, but for the sizes that follow from the data."""

    def config(
        self, vocab_size: int, aux_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> dict[str, Any]:
        """The public `config.json`. A kind without masks ignores `mask_token_id`."""
        ...

    def network(
        self,
        raw: dict[str, Any],
        embedding: torch.Tensor,
        whitening: torch.Tensor | None,
        max_len: int,
    ) -> TrainedDraft:
        """The draft that a config describes, for texts of up to `max_len` tokens."""
        ...

    def initialise(
        self,
        draft: TrainedDraft,
        guess: LinearGuess,
        parts: TargetParts,
        head: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        """Set the weights; `head` [draft vocab, hidden] are the target's output rows."""
        ...


@dataclass(frozen=True)
class Eagle3Kind:
    """Attributes:
    target: the target's text configuration.
    attention: `mha` or `mla`.
    """

    target: PretrainedConfig
    attention: str

    def config(
        self, vocab_size: int, aux_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> dict[str, Any]:
        return make_draft_config(self.target, self.attention, vocab_size, aux_layer_ids)

    def network(
        self,
        raw: dict[str, Any],
        embedding: torch.Tensor,
        whitening: torch.Tensor | None,
        max_len: int,
    ) -> TrainedDraft:
        return TrainingDraft(Eagle3Config.from_dict(raw), embedding, whitening, max_len)

    def initialise(
        self,
        draft: TrainedDraft,
        guess: LinearGuess,
        parts: TargetParts,
        head: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        assert isinstance(draft, TrainingDraft)
        initialise(draft, guess, parts.final_norm, head, parts.mlp, generator)


@dataclass(frozen=True)
class BlockKind:
    """Attributes:
    target: the target's text configuration.
    num_layers, markov_rank: of the draft.
    block_size: its drafts.
    """

    target: PretrainedConfig
    num_layers: int
    markov_rank: int
    block_size: int

    def config(
        self, vocab_size: int, aux_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> dict[str, Any]:
        return make_block_config(
            self.target,
            self.num_layers,
            self.block_size,
            self.markov_rank,
            vocab_size,
            mask_token_id,
            aux_layer_ids,
        )

    def network(
        self,
        raw: dict[str, Any],
        embedding: torch.Tensor,
        whitening: torch.Tensor | None,
        max_len: int,
    ) -> TrainedDraft:
        return TrainingBlockDraft(BlockDraftConfig.from_dict(raw), embedding, whitening, max_len)

    def initialise(
        self,
        draft: TrainedDraft,
        guess: LinearGuess,
        parts: TargetParts,
        head: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        assert isinstance(draft, TrainingBlockDraft)
        initialise_block(
            draft, guess, parts.final_norm, head, parts.embedding, parts.mlp, generator
        )


def kind_of(raw: dict[str, Any], target: PretrainedConfig) -> DraftKind:
    """The kind of a draft whose config `DraftKind.config` made."""
    if raw.get("speculators_model_type") is None:
        return Eagle3Kind(target, "mla" if raw.get("kv_lora_rank") else "mha")
    layers = raw.get("transformer_layer_config", {}).get("num_hidden_layers", 1)
    return BlockKind(target, layers, raw.get("markov_rank", 1), raw.get("block_size", 1))
