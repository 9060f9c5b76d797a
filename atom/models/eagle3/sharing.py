"""A draft's vocabulary: its own embedding, output head and token ids, or the target's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from atom.model_ops.embedding import OutputHead, ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.base import CausalLM
from atom.models.eagle3.parts import DraftConfig, DraftParts


class SharingDraft(nn.Module, ABC):
    """A draft that uses the target's embedding and output head where it has none of its own.

    Attributes:
        embed: [T] int64 -> [T, hidden], once the target's is shared.
        renames: prefixes of tensor names in checkpoints, and in the model; the first match applies.
        d2t: offsets from draft to target token ids, [draft vocabulary] int64; None if the ids are
            the same.
    """

    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    embed: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, config: DraftConfig, parts: DraftParts, context: LayerContext) -> None:
        super().__init__()
        size = config.hidden_size
        # In a tuple, so that the target's module is not registered as a submodule.
        self._shared_head: tuple[OutputHead, ...] = ()
        if parts.embed_tokens:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, size, context, "embed_tokens"
            )
            self.embed = self.embed_tokens.forward
        if parts.lm_head:
            self.lm_head = ParallelLMHead(config.draft_vocab_size, size, context, "lm_head")
        self.d2t = None
        if parts.d2t:
            offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=context.device)
            self.d2t = nn.Parameter(offsets, requires_grad=False)
        self._target_ids: torch.Tensor | None = None
        self._parts = parts

    @property
    @abstractmethod
    def weight_mapping(self) -> WeightMapping:
        """From the checkpoint's tensor names to this model's parameters."""

    def share_with(self, target: CausalLM) -> None:
        """Use the target's embedding and output head where the draft has none.

        `DraftParts.check` must have passed.
        """
        if not self._parts.embed_tokens:
            self.embed = target.token_embedding.forward
        if not self._parts.lm_head:
            self._shared_head = (target.output_head,)

    @property
    def head(self) -> OutputHead:
        """The output head, [R, hidden] -> [R, draft vocabulary] float32."""
        return self.lm_head if self._parts.lm_head else self._shared_head[0]

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Convert draft token ids to target ids, same shape; `d2t` has offsets."""
        target_ids = self.target_ids
        return draft_ids if target_ids is None else target_ids[draft_ids]

    @property
    def target_ids(self) -> torch.Tensor | None:
        """[draft vocabulary] int64, the target's ids of the draft's tokens; None if the same."""
        if self.d2t is not None and self._target_ids is None:
            draft_vocabulary = torch.arange(len(self.d2t), device=self.d2t.device)
            self._target_ids = draft_vocabulary + self.d2t
        return self._target_ids
