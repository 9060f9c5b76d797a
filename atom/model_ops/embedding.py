"""Token embedding and output head, split over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from atom.model_ops.layer_context import LayerContext
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


class ParallelLMHead(nn.Module):
    """Output head, split over the ranks by vocabulary."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: LayerContext,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.group = context.group
        rows = context.group.divide(vocab_size, "vocab_size")
        self._tied_to = (tied_to,)  # a tuple, so that it is not registered as a submodule again
        if tied_to is None:
            self.weight = context.empty(rows, hidden_size)
        self._logits = context.ops.resolve(
            "logits", context.dtype, in_features=hidden_size, out_features=rows
        )

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        if name != "weight" or shard is not None:
            raise ValueError(f"an output head has a weight only, not {name} {shard or ''}")
        copy_weight(self.weight, self.group.shard(tensor, 0))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32: the product is never rounded to the weights' type."""
        embedding = self._tied_to[0]
        weight = self.weight if embedding is None else embedding.weight
        return self.group.all_gather(self._logits(hidden_states, weight))
