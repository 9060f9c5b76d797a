"""Token embedding and output head, split over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import DequantisedMatrix
from atom.model_ops.quant.storage import Cut, Part
from atom.model_ops.weights import copy_weight


class VocabParallelEmbedding(nn.Module):
    """Token embedding, split over the ranks by vocabulary.

    Attributes:
        vocab_size: of all ranks.
        weight: [own tokens, hidden].
    """

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.group = context.group
        self.vocab_size = vocab_size
        self._own = vocab_share(context.group, vocab_size)
        self.weight = context.empty(self._own.size, hidden_size)
        self._lookup = context.ops.resolve("embedding", context.dtype, size=hidden_size)
        if self.group.size > 1:
            self._all_reduce = context.ops.resolve(
                "all_reduce",
                context.dtype,
                size=hidden_size,
                num_ranks=self.group.size,
                peer_access=self.group.peer_access,
            )

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        if name != "weight" or shard is not None:
            raise ValueError(f"an embedding has a weight only, not {name} {shard or ''}")
        wanted = [self.vocab_size, self.weight.shape[1]]
        if list(tensor.shape) != wanted:
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants {wanted}"
            )
        copy_weight(self.weight, tensor.narrow(0, self._own.start, self._own.size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""
        if self.group.size == 1:
            own: torch.Tensor = self._lookup(input_ids, self.weight)
            return own
        local = input_ids - self._own.start
        absent = (local < 0) | (local >= self._own.size)
        part: torch.Tensor = self._lookup(local.masked_fill(absent, 0), self.weight)
        part.masked_fill_(absent[:, None], 0)
        out: torch.Tensor = self._all_reduce(part, self.group)
        return out


class ParallelLMHead(DequantisedMatrix):
    """Output head, split over the ranks by vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, context: LayerContext, prefix: str
    ) -> None:
        part = Part(vocab_share(context.group, vocab_size), Cut.whole(hidden_size))
        super().__init__({None: part}, False, context, prefix, "head")
        self._logits = _VocabParallelLogits(vocab_size, hidden_size, context)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32: the product is never rounded to the weights' type."""
        return self._logits.gather(hidden_states, self.weight)

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R] int64: `argmax` of the logits, which are not gathered for it."""
        return self._logits.argmax(hidden_states, self.weight)

    def choose_greedily(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`argmax`, and -1 where the largest logit is not finite, as `choose_tokens` has it."""
        return self._logits.choose_greedily(hidden_states, self.weight)


class TiedLMHead(nn.Module):
    """Output head with the weights of the embedding."""

    def __init__(self, embedding: VocabParallelEmbedding, context: LayerContext) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a submodule again.
        self._embedding = (embedding,)
        hidden_size = embedding.weight.shape[1]
        self._logits = _VocabParallelLogits(embedding.vocab_size, hidden_size, context)

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32, as `ParallelLMHead`."""
        return self._logits.gather(hidden_states, self._embedding[0].weight)

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R] int64, as `ParallelLMHead`."""
        return self._logits.argmax(hidden_states, self._embedding[0].weight)

    def choose_greedily(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R] int64, as `ParallelLMHead`."""
        return self._logits.choose_greedily(hidden_states, self._embedding[0].weight)


OutputHead = ParallelLMHead | TiedLMHead


class _VocabParallelLogits:
    """Logits of a vocabulary that the ranks share."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        self._group = context.group
        self._vocab_size = vocab_size
        self._own = vocab_share(context.group, vocab_size)
        # The first rank has as many tokens as any.
        self._padding = vocab_share(ParallelGroup(0, context.group.size), vocab_size).size
        self._padding -= self._own.size
        self._product = context.ops.resolve(
            "logits", context.dtype, in_features=hidden_size, out_features=self._own.size
        )
        self._argmax = context.ops.resolve("argmax", torch.float32, vocab_size=self._own.size)

    def gather(self, hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[R, hidden] and this rank's weight -> [R, vocab] float32."""
        logits: torch.Tensor = self._product(hidden_states, weight)
        if self._group.size == 1:
            return logits
        if self._padding:
            logits = F.pad(logits, (0, self._padding))
        # The last rank's padding is cut off.
        return self._group.all_gather(logits)[:, : self._vocab_size].contiguous()

    def argmax(self, hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[R, hidden] and this rank's weight -> [R] int64; of equal logits, the lowest id."""
        logits: torch.Tensor = self._product(hidden_states, weight)
        if self._group.size > 1:
            return self._largest(logits)[0]
        tokens: torch.Tensor = self._argmax(logits)
        return tokens

    def choose_greedily(self, hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`argmax`, and -1 where the largest logit is not finite."""
        token, logit = self._largest(self._product(hidden_states, weight))
        return token.masked_fill_(~logit.isfinite(), -1)

    def _largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Own logits -> [R] int64, and [R] float32: the largest of all ranks, of which NaN is one.

        The ranks exchange one logit and its id per row, as [R, 2] int32.
        """
        token = logits.argmax(dim=-1, keepdim=True)
        logit = logits.gather(-1, token).view(torch.int32)
        pair = torch.cat((logit, (token + self._own.start).int()), dim=-1)
        pairs = self._group.all_gather(pair).view(-1, self._group.size, 2)
        # The first of equal ones is that of the lowest rank, which has the lowest ids.
        every = pairs[..., 0].view(torch.float32)
        rank = every.argmax(dim=-1, keepdim=True)
        return pairs[..., 1].gather(-1, rank)[:, 0].long(), every.gather(-1, rank)[:, 0]


def vocab_share(group: ParallelGroup, vocab_size: int) -> Cut:
    """This rank's tokens: as many on every rank, and what is left on the last.

    Raises:
        ConfigError: when nothing is left.
    """
    share = -(-vocab_size // group.size)
    if (left := vocab_size - share * (group.size - 1)) < 1:
        raise ConfigError(
            f"vocab_size={vocab_size} does not split over {group.size} ranks: with {share} tokens "
            f"each, none is left for the last"
        )
    is_last = group.rank == group.size - 1
    return Cut(group.rank * share, left if is_last else share, vocab_size)
