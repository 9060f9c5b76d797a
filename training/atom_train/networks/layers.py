"""Parts of the drafts for autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from atom.model_ops.rotary import rope_frequencies


@dataclass(frozen=True)
class TrainingBatch:
    """R rows of B texts; row t of a text combines the hidden state at t with token t + 1.

    Q of the rows draft: those whose token the target generated.

    Attributes:
        token_ids: [R] int64, the token after each row.
        aux: [R, A * hidden].
        positions, texts: [R] int64; position in its text, and index of the text.
        active: [Q] int64, the rows that draft.
        temperatures: [Q], at which draft and target are compared.
        next_token_ids: [depth, Q] int64; input token t + 1 + j of draft step j.
        targets: [depth, Q] int64; row of the `target` distributions for step j.
        valid: [depth, Q] bool; whether the text is long enough for step j.
        target_ids, target_probs: [N, K]; draft token ids and probabilities, most likely first.
        answer_ids: [depth, Q] int64; the text's token at that place, as a target id.
        final: [N, hidden], the target's final states that the distributions come from.
    """

    token_ids: torch.Tensor
    aux: torch.Tensor
    positions: torch.Tensor
    texts: torch.Tensor
    active: torch.Tensor
    temperatures: torch.Tensor
    next_token_ids: torch.Tensor
    targets: torch.Tensor
    valid: torch.Tensor
    target_ids: torch.Tensor
    target_probs: torch.Tensor
    answer_ids: torch.Tensor
    final: torch.Tensor


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self._eps)


class Rope:
    """RoPE on [N, heads, dim], with halves or interleaved pairs."""

    def __init__(self, config: PretrainedConfig, dim: int, max_len: int, interleaved: bool) -> None:
        self.frequencies, self._scaling = rope_frequencies(config, dim, max_len)
        self._interleaved = interleaved

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self.frequencies.to(x.device)
        cos, sin = (f(angles)[:, None] * self._scaling for f in (torch.cos, torch.sin))
        if self._interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate, bias=False)
        self.up_proj = nn.Linear(size, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attending:
    """Attention of a batch's drafting rows, padded to [texts, longest]."""

    def __init__(self, batch: TrainingBatch) -> None:
        texts, active = batch.texts, batch.active
        self._num_texts = int(texts[-1]) + 1
        self._num_keys = int(batch.positions.max()) + 1
        owners = texts[active]
        counts = torch.bincount(owners, minlength=self._num_texts)
        self._num_queries = int(counts.max())
        order = (
            torch.arange(len(active), device=active.device) - (counts.cumsum(0) - counts)[owners]
        )
        self._key_places = texts * self._num_keys + batch.positions
        self._query_places = owners * self._num_queries + order
        reach = torch.zeros(
            self._num_texts * self._num_queries, dtype=torch.int64, device=active.device
        )
        reach[self._query_places] = batch.positions[active]
        keys = torch.arange(self._num_keys, device=active.device)
        unseen = keys > reach.view(self._num_texts, 1, self._num_queries, 1)
        self._mask = torch.zeros(unseen.shape, device=active.device).masked_fill_(
            unseen, float("-inf")
        )

    def pad_keys(self, x: torch.Tensor) -> torch.Tensor:
        """[R, heads, dim] -> [texts, heads, longest, dim]."""
        return self._pad(x, self._key_places, self._num_keys)

    def pad_queries(self, x: torch.Tensor) -> torch.Tensor:
        """[Q, heads, dim] -> [texts, heads, longest, dim]."""
        return self._pad(x, self._query_places, self._num_queries)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chain: Sequence[tuple[torch.Tensor, torch.Tensor]],
        scale: float,
    ) -> torch.Tensor:
        """Attend to the first pass's keys and those of the row's own chain; returns [Q, heads *
        dim].
        """
        q = self.pad_queries(q * scale)
        scores = [q @ k.transpose(-1, -2) + self._mask]
        scores += [(q * own).sum(-1, keepdim=True) for own, _ in chain]
        weights = torch.cat(scores, dim=-1).softmax(-1) if chain else scores[0].softmax(-1)
        out = weights[..., : self._num_keys] @ v
        for j, (_, own) in enumerate(chain):
            out = out + weights[..., self._num_keys + j, None] * own
        return out.transpose(1, 2).flatten(0, 1).flatten(1)[self._query_places]

    def _pad(self, x: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
        padded = x.new_zeros((self._num_texts * width, *x.shape[1:]))
        padded = padded.index_copy(0, places, x)
        return padded.view(self._num_texts, width, *x.shape[1:]).transpose(1, 2)


class TrainedDraft(nn.Module, ABC):
    """A draft with the checkpoint's parameter names.

    Args:
        fan_in: A * hidden.
        embedding: [vocab, hidden], the target's; frozen.
        whitening: [A * hidden, A * hidden], applied to the aux states before `fc`; None for none.
    """

    whitening: torch.Tensor | None

    def __init__(
        self, fan_in: int, embedding: torch.Tensor, whitening: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(fan_in, embedding.shape[1], bias=False)
        self._embedding = (embedding,)
        self.register_buffer("whitening", whitening)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embedding[0]).float()

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """[R, A * hidden] -> [R, hidden], in float32: a few columns of the aux states are huge."""
        with torch.autocast(aux.device.type, enabled=False):
            fused: torch.Tensor = self.fc(aux if self.whitening is None else aux @ self.whitening)
        return fused

    @abstractmethod
    def output_head(self) -> torch.Tensor:
        """[draft vocab, width]; times the rows of `unroll`, these are the logits."""

    @abstractmethod
    def unroll(self, batch: TrainingBatch, depth: int) -> list[torch.Tensor]:
        """Rows [Q, width] of each draft; tokens before a draft are the text's."""
