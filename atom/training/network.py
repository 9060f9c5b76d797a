"""The draft for autograd: the same computation as in serving, unrolled over whole texts.

The serving classes use paged attention and fused kernels without gradients. This network has the
checkpoint's parameter names, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from atom.model_ops.rotary import rope_frequencies
from atom.models.deepseek_v2 import attention_scale
from atom.models.eagle3.config import Eagle3Config
from atom.models.llama import head_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self._eps)


class _Rope:
    """RoPE on [N, heads, dim], with halves or interleaved pairs."""

    def __init__(self, config: PretrainedConfig, dim: int, max_len: int, interleaved: bool) -> None:
        self._frequencies, self._scaling = rope_frequencies(config, dim, max_len)
        self._interleaved = interleaved

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self._frequencies.to(x.device)
        cos, sin = (f(angles)[:, None] * self._scaling for f in (torch.cos, torch.sin))
        if self._interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MultiHeadAttention(nn.Module):
    """MHA projections, with the names of the Llama family."""

    def __init__(self, config: PretrainedConfig, max_len: int) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        dim = head_size(config)
        kv_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, size, bias=False)
        self.scale = dim**-0.5
        self._dim, self._groups = dim, heads // kv_heads
        self._rope = _Rope(config, dim, max_len, interleaved=False)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[N, 2 * hidden] -> [N, heads, dim]."""
        return self._rope(self.q_proj(x).view(len(x), -1, self._dim), positions)

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self._rope(self.k_proj(x).view(len(x), -1, self._dim), positions)
        v = self.v_proj(x).view(len(x), -1, self._dim)
        if self._groups == 1:
            return k, v
        return k.repeat_interleave(self._groups, 1), v.repeat_interleave(self._groups, 1)


class LatentAttention(nn.Module):
    """MLA projections, with the names of the DeepSeek family."""

    def __init__(self, config: PretrainedConfig, max_len: int) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        self._heads = heads
        self._nope, self._rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._v_dim, self._rank = config.v_head_dim, config.kv_lora_rank
        eps, query_dim = config.rms_norm_eps, heads * (self._nope + self._rope_dim)
        self.q_a_proj = nn.Linear(2 * size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = _Norm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * size, self._rank + self._rope_dim, bias=False)
        self.kv_a_layernorm = _Norm(self._rank, eps)
        self.kv_b_proj = nn.Linear(self._rank, heads * (self._nope + self._v_dim), bias=False)
        self.o_proj = nn.Linear(heads * self._v_dim, size, bias=False)
        self.scale = attention_scale(config)
        self._rope = _Rope(config, self._rope_dim, max_len, bool(config.rope_interleave))

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(len(x), self._heads, -1)
        nope, rope = q.split((self._nope, self._rope_dim), dim=-1)
        return torch.cat((nope, self._rope(rope, positions)), dim=-1)

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = self.kv_a_proj_with_mqa(x).split((self._rank, self._rope_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(len(x), self._heads, -1)
        k_nope, v = kv.split((self._nope, self._v_dim), dim=-1)
        k_rope = self._rope(rope[:, None], positions).expand(-1, self._heads, -1)
        return torch.cat((k_nope, k_rope), dim=-1), v


class _MLP(nn.Module):
    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate, bias=False)
        self.up_proj = nn.Linear(size, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Midlayer(nn.Module):
    def __init__(self, config: Eagle3Config, max_len: int) -> None:
        super().__init__()
        network, size = config.network, config.hidden_size
        eps = network.rms_norm_eps
        attention = LatentAttention if config.is_mla else MultiHeadAttention
        self.input_layernorm = _Norm(size, eps)
        self.hidden_norm = _Norm(size, eps)
        self.self_attn = attention(network, max_len)
        self.post_attention_layernorm = _Norm(size, eps)
        self.mlp = _MLP(size, network.intermediate_size)

    def input(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] both -> [N, 2 * hidden]."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def output(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output hidden state."""
        hidden = hidden + self.self_attn.o_proj(attended)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _Attending:
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


class TrainingDraft(nn.Module):
    """An Eagle3 draft with the checkpoint's parameter names.

    Args:
        embedding: [vocab, hidden], the target's; frozen.
        whitening: [A * hidden, A * hidden], applied to the aux states before `fc`; None for none.
        max_len: length of the longest text.
    """

    whitening: torch.Tensor | None

    def __init__(
        self,
        config: Eagle3Config,
        embedding: torch.Tensor,
        whitening: torch.Tensor | None,
        max_len: int,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.fc = nn.Linear(config.fc_fan_in, size, bias=False)
        self.midlayer = _Midlayer(config, max_len)
        self.norm = _Norm(size, config.network.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self._embedding = (embedding,)
        self.register_buffer("whitening", whitening)

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """[R, A * hidden] -> [R, hidden], in float32: a few columns of the aux states are huge."""
        with torch.autocast(aux.device.type, enabled=False):
            fused: torch.Tensor = self.fc(aux if self.whitening is None else aux @ self.whitening)
        return fused

    def output_head(self) -> torch.Tensor:
        """[draft vocab, hidden]."""
        return self.lm_head.weight

    def unroll(self, batch: TrainingBatch, depth: int) -> list[torch.Tensor]:
        """The normed hidden states [Q, hidden] of each draft step; it reads the text's tokens."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        embedding, attending = self._embedding[0], _Attending(batch)
        hidden = self.fuse(batch.aux)
        x = layer.input(F.embedding(batch.token_ids, embedding).float(), hidden)
        keys, values = (attending.pad_keys(t) for t in attention.keys_values(x, batch.positions))
        x, hidden, positions = x[batch.active], hidden[batch.active], batch.positions[batch.active]
        chain: list[tuple[torch.Tensor, torch.Tensor]] = []
        outcomes: list[torch.Tensor] = []
        for j in range(depth):
            if j:
                embeds = F.embedding(batch.next_token_ids[j], embedding).float()
                x = layer.input(embeds, hidden)
                own = attention.keys_values(x, positions + j)
                chain.append((attending.pad_queries(own[0]), attending.pad_queries(own[1])))
            q = attention.queries(x, positions + j)
            attended = attending.attend(q, keys, values, chain, attention.scale)
            hidden = layer.output(attended, hidden)
            outcomes.append(self.norm(hidden))
        return outcomes
