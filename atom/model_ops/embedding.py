"""Token embedding and output head, split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import DequantisedMatrix, share_of
from atom.model_ops.quant.storage import Cut, Part
from atom.model_ops.weights import copy_weight


class VocabParallelEmbedding(nn.Module):
    """Token embedding, split over the ranks by vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.group = context.group
        self.rows = context.group.divide(vocab_size, "vocab_size")
        self.weight = context.empty(self.rows, hidden_size)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        if name != "weight" or shard is not None:
            raise ValueError(f"an embedding has a weight only, not {name} {shard or ''}")
        copy_weight(self.weight, self.group.shard(tensor, 0))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.group.rank * self.rows
        absent = (local < 0) | (local >= self.rows)
        out = F.embedding(local.masked_fill(absent, 0), self.weight)
        return self.group.all_reduce(out.masked_fill_(absent[:, None], 0))


class ParallelLMHead(DequantisedMatrix):
    """Output head, split over the ranks by vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, context: LayerContext, prefix: str
    ) -> None:
        rows = share_of(context.group, vocab_size, "vocab_size")
        part = Part(rows, Cut.whole(hidden_size))
        super().__init__({None: part}, False, context, prefix, "head")
        self._logits = _resolve_logits(context, hidden_size, rows.size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32: the product is never rounded to the weights' type."""
        return self.group.all_gather(self._logits(hidden_states, self.weight))


class TiedLMHead(nn.Module):
    """Output head with the weights of the embedding."""

    def __init__(self, embedding: VocabParallelEmbedding, context: LayerContext) -> None:
        super().__init__()
        self.group = context.group
        # In a tuple, so that it is not registered as a submodule again.
        self._embedding = (embedding,)
        rows, hidden_size = embedding.weight.shape
        self._logits = _resolve_logits(context, hidden_size, rows)

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32, as `ParallelLMHead`."""
        return self.group.all_gather(self._logits(hidden_states, self._embedding[0].weight))


OutputHead = ParallelLMHead | TiedLMHead


def _resolve_logits(context: LayerContext, hidden_size: int, rows: int) -> Any:
    return context.ops.resolve("logits", context.dtype, in_features=hidden_size, out_features=rows)
