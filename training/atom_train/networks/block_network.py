"""The block drafter for autograd: a DSpark draft with a Markov head.

It has the checkpoint's parameter names, and a test compares it with the network that is served.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from atom.models.block_draft.config import BlockDraftConfig
from atom_train.networks.layers import MLP, Attending, Norm, Rope, TrainedDraft, TrainingBatch


class BlockSelfAttention(nn.Module):
    """Qwen3's projections."""

    def __init__(self, config: BlockDraftConfig, max_len: int) -> None:
        super().__init__()
        network, size = config.network, config.hidden_size
        dim, bias = network.head_dim, network.attention_bias
        heads, kv_heads = network.num_attention_heads, network.num_key_value_heads
        self.q_proj = nn.Linear(size, heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, size, bias=bias)
        self.q_norm = Norm(dim, network.rms_norm_eps)
        self.k_norm = Norm(dim, network.rms_norm_eps)
        self.scale = dim**-0.5
        self._dim, self._groups = dim, heads // kv_heads
        self._rope = Rope(network, dim, max_len, interleaved=False)
        self.frequencies = self._rope.frequencies

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, heads, dim]."""
        return self._rope(self.q_norm(self.q_proj(x).view(len(x), -1, self._dim)), positions)

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self._rope(self.k_norm(self.k_proj(x).view(len(x), -1, self._dim)), positions)
        v = self.v_proj(x).view(len(x), -1, self._dim)
        return k.repeat_interleave(self._groups, 1), v.repeat_interleave(self._groups, 1)


class BlockLayer(nn.Module):
    """A decoder layer whose context comes from other states than its rows."""

    def __init__(self, config: BlockDraftConfig, max_len: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.network.rms_norm_eps
        self.input_layernorm = Norm(size, eps)
        self.self_attn = BlockSelfAttention(config, max_len)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = MLP(size, config.network.intermediate_size)

    def forward(
        self,
        hidden: torch.Tensor,
        context: torch.Tensor,
        batch: TrainingBatch,
        attending: Attending,
    ) -> torch.Tensor:
        """Blocks [B, Q, hidden] after their contexts, of states [R, hidden] -> [B, Q, hidden]."""
        attention = self.self_attn
        size = len(hidden)
        keys, values = (
            attending.pad_keys(t) for t in attention.keys_values(context, batch.positions)
        )
        steps = torch.arange(size, device=hidden.device)[:, None]
        places = (batch.positions[batch.active] + 1 + steps).flatten()
        x = self.input_layernorm(hidden).flatten(0, 1)
        queries = attention.queries(x, places).chunk(size)
        own = [
            (attending.pad_queries(k), attending.pad_queries(v))
            for k, v in zip(*(t.chunk(size) for t in attention.keys_values(x, places)), strict=True)
        ]
        attended = torch.stack(
            [attending.attend(q, keys, values, own, attention.scale) for q in queries]
        )
        hidden = hidden + attention.o_proj(attended)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class _MarkovHead(nn.Module):
    def __init__(self, config: BlockDraftConfig, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)


class TrainingBlockDraft(TrainedDraft):
    """A DSpark draft whose blocks see all of their context and of themselves.

    The block that starts at the anchor, the token after a row, has one row per draft.

    Args:
        max_len: length of the longest text.
    """

    def __init__(
        self,
        config: BlockDraftConfig,
        embedding: torch.Tensor,
        whitening: torch.Tensor | None,
        max_len: int,
    ) -> None:
        super().__init__(config.fc_fan_in, embedding, whitening)
        size, network = config.hidden_size, config.network
        assert config.markov is not None
        self.config = config
        self.hidden_norm = Norm(size, network.rms_norm_eps)
        self.blocks = tuple(BlockLayer(config, max_len) for _ in range(network.num_hidden_layers))
        self.layers = nn.ModuleList(self.blocks)
        self.norm = Norm(size, network.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.markov_head = _MarkovHead(config, config.markov.rank)

    def output_head(self) -> torch.Tensor:
        """[draft vocab, hidden + rank]."""
        return torch.cat((self.lm_head.weight, self.markov_head.markov_w2.weight), dim=1)

    def unroll(self, batch: TrainingBatch, depth: int) -> list[torch.Tensor]:
        """Of each draft, the normed hidden state and the vector of the token before it."""
        assert depth == self.config.block_size
        context = self.hidden_norm(self.fuse(batch.aux))
        attending = Attending(batch)
        tokens = batch.next_token_ids.clone()
        tokens[1:] = self.config.mask_token_id
        hidden = self.embed(tokens)
        for layer in self.blocks:
            hidden = layer(hidden, context, batch, attending)
        vectors = F.embedding(batch.next_token_ids, self.markov_head.markov_w1.weight)
        return list(torch.cat((self.norm(hidden), vectors), dim=-1))
