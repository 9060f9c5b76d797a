"""Token embedding and output head, split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.kernels.torch.gather import own_rows
from atom.model_ops.kernels.torch.sampling import largest_of_pairs, largest_pair
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.base import LayerKind
from atom.model_ops.quant.storage import Cut, Part
from atom.model_ops.rank_sums import resolve_plain_sum
from atom.model_ops.registry import OpUnavailableError
from atom.model_ops.stacked import PreparedMatrix

# The ops of these names.
PairOp = Callable[[torch.Tensor, int], torch.Tensor]
OfPairsOp = Callable[[torch.Tensor, torch.Tensor | None, bool], torch.Tensor]


class VocabMatrix(PreparedMatrix):
    """A row per token of this rank's share of the vocabulary.

    Attributes:
        vocab_size: of all ranks.
        weight: [own tokens, hidden], if it is not quantised.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, context: LayerContext, prefix: str, kind: LayerKind
    ) -> None:
        own = vocab_share(context.group, vocab_size)
        part = Part(own, Cut.whole(hidden_size))
        super().__init__({None: part}, False, context, prefix, kind)
        self.vocab_size = vocab_size
        self._own = own
        if kind == "head" or self.storage.format is not None:
            self.resolve("logits", context, prefix)
        self._lookup = self._resolve_lookup(context)

    def _resolve_lookup(self, context: LayerContext) -> Callable[[torch.Tensor], torch.Tensor]:
        """Rows by their number on this rank, [T] int64 -> [T, hidden]."""
        if self.storage.format is None:
            lookup = context.ops.resolve("embedding", context.dtype, size=self.in_features)
            return lambda ids: lookup(ids, self.weight)
        # It reads what the product's implementation prepares.
        query = self.choice.query
        found = context.ops.resolve_weights(
            "quant_embedding", query.dtype, query.weights, **query.shape
        )
        if found.name != self.choice.name:
            raise OpUnavailableError(
                f"quant_logits of {query.weights} is computed by {self.choice.name} and "
                f"quant_embedding by {found.name}, and they read the same weights; choose the "
                f"same with ATOM_OP_QUANT_LOGITS and ATOM_OP_QUANT_EMBEDDING"
            )
        return lambda ids: found.function(ids, self._prepared, self._dtype)

    def own_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, own tokens] float32."""
        weights = self.weight if self._prepared is None else self._prepared
        logits: torch.Tensor = self.choice.function(hidden_states, weights)
        return logits

    def dense(self) -> torch.Tensor:
        """All rows of this rank as numbers, [own tokens, hidden]; a copy if they are quantised."""
        if self.storage.format is None:
            return self.weight.data
        return self._lookup(torch.arange(self._own.size, device=self.storage.device))


class VocabParallelEmbedding(VocabMatrix):
    """Token embedding, split over the ranks by vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(vocab_size, hidden_size, context, prefix, "embedding")
        if self.group.size > 1:
            self._all_reduce = resolve_plain_sum(hidden_size, context)
            self._share = self._resolve_share(context)

    def _resolve_share(self, context: LayerContext) -> Callable[[torch.Tensor], torch.Tensor]:
        """Rows of this rank's tokens and zeros for others, [T] int64 -> [T, hidden]."""
        start, count = self._own.start, self._own.size
        if self.storage.format is not None:
            return lambda ids: own_rows(ids, start, count, self._lookup)
        size = self.in_features
        lookup = context.ops.resolve("embedding", context.dtype, size=size)
        share = context.ops.resolve("share_embedding", context.dtype, size=size)
        return lambda ids: share(ids, self.weight, start, lookup)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden]."""
        if self.group.size == 1:
            return self._lookup(input_ids)
        assert self._all_reduce is not None
        out: torch.Tensor = self._all_reduce(self._share(input_ids), self.group)
        return out


class ParallelLMHead(VocabMatrix):
    """Output head, split over the ranks by vocabulary.

    Attributes:
        argmax, choose_greedily: as `VocabParallelLogits` has them.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(vocab_size, hidden_size, context, prefix, "head")
        self._logits = VocabParallelLogits(self, context)
        self.argmax = self._logits.argmax
        self.choose_greedily = self._logits.choose_greedily

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32: the product is never rounded to the weights' type."""
        return self._logits.gather(hidden_states)


class TiedLMHead(nn.Module):
    """Output head with the weights of the embedding.

    Attributes:
        argmax, choose_greedily: as `VocabParallelLogits` has them.
    """

    def __init__(self, embedding: VocabParallelEmbedding, context: LayerContext) -> None:
        super().__init__()
        if embedding.storage.format is None:
            embedding.resolve("logits", context, "the tied head")
        # In a tuple, so that it is not registered as a submodule again.
        self._embedding = (embedding,)
        self._logits = VocabParallelLogits(embedding, context)
        self.argmax = self._logits.argmax
        self.choose_greedily = self._logits.choose_greedily

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding[0].weight

    def dense(self) -> torch.Tensor:
        """As `VocabMatrix`."""
        return self._embedding[0].dense()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32, as `ParallelLMHead`."""
        return self._logits.gather(hidden_states)


OutputHead = ParallelLMHead | TiedLMHead


class VocabParallelLogits:
    """Logits of a vocabulary that the ranks share."""

    def __init__(self, matrix: VocabMatrix, context: LayerContext) -> None:
        self._group = context.group
        self._vocab_size = matrix.vocab_size
        self._own = vocab_share(context.group, matrix.vocab_size)
        # The first rank has as many tokens as any.
        self._padding = vocab_share(ParallelGroup(0, context.group.size), matrix.vocab_size).size
        self._padding -= self._own.size
        self._product = matrix.own_logits
        size = self._own.size
        self._argmax = context.ops.resolve("argmax", torch.float32, vocab_size=size)
        self._pair: PairOp = largest_pair
        self._of_pairs: OfPairsOp = largest_of_pairs
        if self._group.size > 1:
            self._pair = context.ops.resolve("largest_pair", torch.float32, vocab_size=size)
            self._of_pairs = context.ops.resolve(
                "largest_of_pairs", torch.float32, num_ranks=self._group.size
            )

    def gather(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32."""
        logits = self._product(hidden_states)
        if self._group.size == 1:
            return logits
        if self._padding:
            logits = F.pad(logits, (0, self._padding))
        # The last rank's padding is cut off.
        return self._group.all_gather(logits)[:, : self._vocab_size].contiguous()

    def argmax(
        self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, hidden] -> [R] int64: the largest logit, which are not gathered for it; of equal
        ones the first.

        Args:
            token_ids: [vocab] int64, the token of each logit; None if these are their places.
        """
        logits = self._product(hidden_states)
        if self._group.size > 1:
            return self._largest(logits, token_ids, needs_finite=False)
        tokens: torch.Tensor = self._argmax(logits, token_ids)
        return tokens

    def choose_greedily(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`argmax`, and -1 where the largest logit is not finite, as `choose_tokens` has it."""
        return self._largest(self._product(hidden_states), None, needs_finite=True)

    def _largest(
        self, logits: torch.Tensor, token_ids: torch.Tensor | None, *, needs_finite: bool
    ) -> torch.Tensor:
        """Own logits -> [R] int64: the token with the largest of all ranks.

        The ranks exchange one logit and its id per row. Of equal ones the first is that of the
        lowest rank, which has the lowest ids.
        """
        pairs = self._group.stack(self._pair(logits, self._own.start))
        return self._of_pairs(pairs, token_ids, needs_finite)


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
