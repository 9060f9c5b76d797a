"""The heads that choose along a block: none, Markov or selector, and the guess of acceptance."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.quant.storage import Cut, Part
from atom.model_ops.stacked import DequantisedMatrix
from atom.models.block_draft.config import BlockDraftConfig, Markov, Selector


class PathHead(nn.Module):
    """Every draft of the block is chosen for itself, from the logits of its row.

    Attributes:
        walks: whether a draft depends on the one before it instead.
    """

    walks: ClassVar[bool] = False

    def begin(self, states: torch.Tensor) -> Any:
        """What to pass to the first `score`, from any row's states [S, hidden]."""
        return None

    def score(
        self,
        logits: torch.Tensor,
        states: torch.Tensor,
        previous: torch.Tensor,
        carried: Any,
    ) -> tuple[torch.Tensor, Any]:
        """The logits to choose the next draft from, and what to pass to the next call.

        Args:
            logits: [S, draft vocabulary] float32, of the draft's rows; may be overwritten.
            states: [S, hidden], after the final norm.
            previous: [S] int64, the token before.
        """
        return logits, carried


class MarkovHead(PathHead):
    """Adds a bias that follows from the token before, and from the rows' states in two of three
    kinds. Source: the DSpark paper and checkpoints.
    """

    walks = True

    def __init__(self, config: BlockDraftConfig, markov: Markov, context: LayerContext) -> None:
        super().__init__()
        rank, size, prefix = markov.rank, config.hidden_size, "markov_head"
        self._kind, self._rank = markov.kind, rank
        self.markov_w1 = VocabParallelEmbedding(
            config.vocab_size, rank, context, f"{prefix}.markov_w1"
        )
        self.markov_w2 = ParallelLMHead(
            config.draft_vocab_size, rank, context, f"{prefix}.markov_w2"
        )
        if markov.kind == "gated":
            self.gate_proj = ReplicatedLinear(
                size + rank, rank, True, context, f"{prefix}.gate_proj"
            )
        if markov.kind == "rnn":
            self.joint_proj = ReplicatedLinear(
                2 * rank + size, 3 * rank, True, context, f"{prefix}.joint_proj"
            )
        self._add = context.ops.resolve("add", torch.float32, size=config.draft_vocab_size)

    def begin(self, states: torch.Tensor) -> Any:
        return states.new_zeros(states.shape[0], self._rank) if self._kind == "rnn" else None

    def score(
        self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor, carried: Any
    ) -> tuple[torch.Tensor, Any]:
        vector = self.markov_w1(previous)
        if self._kind == "gated":
            gate = self.gate_proj(torch.cat((states, vector), dim=-1))
            vector = gate.sigmoid() * vector
        elif self._kind == "rnn":
            joint = self.joint_proj(torch.cat((carried, vector, states), dim=-1))
            keep, new, out = joint.chunk(3, dim=-1)
            keep, vector = keep.sigmoid(), out.tanh()
            carried = keep * carried + (1 - keep) * new.tanh()
        return self._add(logits, self.markov_w2(vector)), carried


class CandidateSelector(PathHead):
    """Chooses among a row's best tokens, by their logits and how well they follow the token before.

    All others get -inf. Source: the DFlash2 checkpoints.
    """

    walks = True

    def __init__(self, config: BlockDraftConfig, selector: Selector, context: LayerContext) -> None:
        super().__init__()
        self._top_k = min(selector.top_k, config.vocab_size)
        self.predecessor_codebook = context.empty(config.vocab_size, selector.rank)
        self.successor_codebook = context.empty(config.vocab_size, selector.rank)
        self.hidden_projection = ReplicatedLinear(
            config.hidden_size,
            selector.rank,
            False,
            context,
            "candidate_selector.hidden_projection",
        )

    def score(
        self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor, carried: Any
    ) -> tuple[torch.Tensor, Any]:
        unary, ids = logits.topk(self._top_k, dim=-1)
        query = self.predecessor_codebook[previous].float() * self.hidden_projection(states).float()
        pairs = torch.einsum("sr,scr->sc", query, self.successor_codebook[ids].float())
        scores = torch.full_like(logits, float("-inf"))
        return scores.scatter_(1, ids, unary + pairs), carried


class ConfidenceHead(nn.Module):
    """The probability that a draft is accepted if those before it are. Source: DSpark."""

    def __init__(
        self, config: BlockDraftConfig, markov: Markov | None, context: LayerContext
    ) -> None:
        super().__init__()
        columns = config.hidden_size + (0 if markov is None else markov.rank)
        part = Part(Cut.whole(1), Cut.whole(columns))
        self.proj = DequantisedMatrix({None: part}, True, context, "confidence_head.proj")
        sizes = {"in_features": columns, "out_features": 1}
        self._product = context.ops.resolve("linear", torch.float32, **sizes)
        self._sigmoid = context.ops.resolve("sigmoid", torch.float32)

    def forward(self, states: torch.Tensor, vectors: torch.Tensor | None) -> torch.Tensor:
        """[S, hidden] and the Markov vectors [S, rank] of the tokens before, or None -> [S]."""
        x = states if vectors is None else torch.cat((states, vectors), dim=-1)
        assert self.proj.bias is not None
        logits = self._product(x.float(), self.proj.weight.float(), self.proj.bias.float())
        confidence: torch.Tensor = self._sigmoid(logits[:, 0])
        return confidence
