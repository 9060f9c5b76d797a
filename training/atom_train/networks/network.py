"""The Eagle3 draft for autograd: the same computation as in serving, unrolled over whole texts.

The serving classes use paged attention and fused kernels without gradients. This network has the
checkpoint's parameter names, and a test compares both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from atom.models.eagle3.config import Eagle3Config
from atom.models.llama import head_size
from atom.models.moe.deepseek_v2 import attention_scale
from atom_train.networks.layers import MLP, Attending, Norm, Rope, TrainedDraft, TrainingBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
        self._rope = Rope(config, dim, max_len, interleaved=False)

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
        self.q_a_layernorm = Norm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * size, self._rank + self._rope_dim, bias=False)
        self.kv_a_layernorm = Norm(self._rank, eps)
        self.kv_b_proj = nn.Linear(self._rank, heads * (self._nope + self._v_dim), bias=False)
        self.o_proj = nn.Linear(heads * self._v_dim, size, bias=False)
        self.scale = attention_scale(config)
        self._rope = Rope(config, self._rope_dim, max_len, bool(config.rope_interleave))

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


class _Midlayer(nn.Module):
    def __init__(self, config: Eagle3Config, max_len: int) -> None:
        super().__init__()
        network, size = config.network, config.hidden_size
        eps = network.rms_norm_eps
        attention = LatentAttention if config.is_mla else MultiHeadAttention
        self.input_layernorm = Norm(size, eps)
        self.hidden_norm = Norm(size, eps)
        self.self_attn = attention(network, max_len)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = MLP(size, network.intermediate_size)

    def input(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] both -> [N, 2 * hidden]."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def output(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output hidden state."""
        hidden = hidden + self.self_attn.o_proj(attended)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class TrainingDraft(TrainedDraft):
    """An Eagle3 draft.

    Args:
        max_len: length of the longest text.
    """

    def __init__(
        self,
        config: Eagle3Config,
        embedding: torch.Tensor,
        whitening: torch.Tensor | None,
        max_len: int,
    ) -> None:
        super().__init__(config.fc_fan_in, embedding, whitening)
        size = config.hidden_size
        self.config = config
        self.midlayer = _Midlayer(config, max_len)
        self.norm = Norm(size, config.network.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def output_head(self) -> torch.Tensor:
        """[draft vocab, hidden]."""
        return self.lm_head.weight

    def unroll(self, batch: TrainingBatch, depth: int) -> list[torch.Tensor]:
        """The normed hidden states [Q, hidden] of each draft step."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        attending = Attending(batch)
        hidden = self.fuse(batch.aux)
        x = layer.input(self.embed(batch.token_ids), hidden)
        keys, values = (attending.pad_keys(t) for t in attention.keys_values(x, batch.positions))
        x, hidden, positions = x[batch.active], hidden[batch.active], batch.positions[batch.active]
        chain: list[tuple[torch.Tensor, torch.Tensor]] = []
        outcomes: list[torch.Tensor] = []
        for j in range(depth):
            if j:
                x = layer.input(self.embed(batch.next_token_ids[j]), hidden)
                own = attention.keys_values(x, positions + j)
                chain.append((attending.pad_queries(own[0]), attending.pad_queries(own[1])))
            q = attention.queries(x, positions + j)
            attended = attending.attend(q, keys, values, chain, attention.scale)
            hidden = layer.output(attended, hidden)
            outcomes.append(self.norm(hidden))
        return outcomes
