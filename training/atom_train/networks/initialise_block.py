"""Initial weights of a block drafter: the best linear prediction, as far as its parts can make it.

The context's states become the prediction from the target's hidden states, which the block's rows
take from the newest position; the Markov head adds the part of the token before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from atom_train.networks.block_network import BlockSelfAttention, TrainingBlockDraft
from atom_train.networks.initialise import LinearGuess, start_at_guess

# Rows of the block are attended to at first, but say little.
_ROW_SCALE = 0.1
# Heads look at the position before their own by this many of RoPE's fastest frequencies.
_RECENT_FREQUENCIES = 8
_RECENT_SIZE = 4.0
_SHARPNESS = 1.5


@torch.no_grad()
def initialise_block(
    draft: TrainingBlockDraft,
    guess: LinearGuess,
    final_norm: torch.Tensor,
    head: torch.Tensor,
    embedding: torch.Tensor,
    mlp: Mapping[str, torch.Tensor] | None,
    generator: torch.Generator,
) -> None:
    """Set the draft's weights. Arguments are those of `initialise`, and the target's embedding
    [vocab, hidden].
    """
    from_embedding = start_at_guess(draft, guess, final_norm, head, generator)
    for layer in draft.blocks:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.mul_(0.5)
        if mlp is not None:
            layer.mlp.gate_proj.weight.copy_(mlp["gate_proj"])
            layer.mlp.up_proj.weight.copy_(mlp["up_proj"])
    draft.blocks[0].input_layernorm.weight.fill_(_ROW_SCALE)
    _look_back(draft.blocks[0].self_attn)
    u, values, vh = torch.linalg.svd(from_embedding)
    rank = draft.markov_head.markov_w2.weight.shape[1]
    root = values[:rank].sqrt()
    embeds = F.rms_norm(embedding.float(), (embedding.shape[1],), None, 1e-6)
    draft.markov_head.markov_w1.weight[:, : len(root)] = embeds @ (root[:, None] * vh[:rank]).T
    directions = final_norm[:, None] * u[:, :rank] * root
    draft.markov_head.markov_w2.weight[:, : len(root)] = head @ directions


def _look_back(attention: BlockSelfAttention) -> None:
    """Heads take the states of the position before their own, mostly, and pass them on."""
    dim = attention.q_norm.weight.shape[0]
    count = min(_RECENT_FREQUENCIES, dim // 2)
    phases = -attention.frequencies[:count]
    for projection, angles in (
        (attention.q_proj, phases),
        (attention.k_proj, torch.zeros(count)),
    ):
        bias = projection.bias.view(-1, 2, dim // 2)
        bias[:, 0, :count] = _RECENT_SIZE * angles.cos()
        bias[:, 1, :count] = _RECENT_SIZE * angles.sin()
    attention.q_norm.weight.fill_(_SHARPNESS)
    attention.k_norm.weight.fill_(_SHARPNESS)
    torch.nn.init.eye_(attention.v_proj.weight)
    torch.nn.init.eye_(attention.o_proj.weight)
