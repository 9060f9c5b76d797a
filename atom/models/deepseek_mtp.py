"""DeepSeek-V3's multi-token prediction layers, which draft for the model that carries them.

Source of names: the checkpoints, where the layers follow the model's last one
(`num_nextn_predict_layers` of them) and bring copies of its embedding and head, and
`README_WEIGHTS.md` beside DeepSeek-V3's weights, which calls both shared. Source of the
arithmetic: arXiv 2412.19437, section 2.2, which leaves two things open:

- `eh_proj` takes the embedding first, then the hidden state: as published engines read the
  trained weights, and the other way round than the paper's formula.
- `hnorm` takes the model's hidden state after its final norm, and a further draft step takes the
  state after `shared_head.norm`. SGLang's `deepseek_nextn` always did; vLLM, which had fed
  further steps the state before the norm, changed for more accepted drafts (vllm-project/vllm
  pull requests 45895 and 47448).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.metadata import AttentionMetadata
from atom.model_ops.quant.unquantized import UnquantizedConfig
from atom.model_ops.rotary import RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
)


@dataclass(frozen=True)
class MTPParts:
    """What a prediction layer brings itself; otherwise it shares the target's."""

    embed_tokens: bool = False
    head: bool = False


class SharedHead(nn.Module):
    """The norm before the output head, and the head if it is not the target's."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps, context)


class MTPLayer(DeepseekV3DecoderLayer):
    """A decoder layer behind the projection that joins a token to the state before it.

    Attributes:
        parts: what it has of its own.
    """

    def __init__(
        self,
        target: DeepseekV3ForCausalLM,
        layer_id: int,
        parts: MTPParts,
        context: LayerContext,
    ) -> None:
        config, prefix = target.config, f"{target.prefix}model.layers.{layer_id}"
        super().__init__(config, layer_id, context, prefix)
        self.parts = parts
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps, context)
        self.hnorm = RMSNorm(size, eps, context)
        # Stored as plain numbers whatever the other layers are quantised to.
        plain = dataclasses.replace(context, quant=UnquantizedConfig())
        self.eh_proj = ReplicatedLinear(2 * size, size, False, plain, f"{prefix}.eh_proj")
        self.shared_head = SharedHead(size, eps, context)
        embedding, head = target.token_embedding, target.output_head
        if parts.embed_tokens:
            embedding = VocabParallelEmbedding(config.vocab_size, size, context)
            self.embed_tokens = embedding
        if parts.head:
            head = ParallelLMHead(config.vocab_size, size, context)
            self.shared_head.head = head
        # In tuples: what is the target's stays out of this module's parameters.
        self._embedding, self._head = (embedding,), (head,)

    def predict(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding,
    ) -> torch.Tensor:
        """input_ids [T], hidden [T, hidden] -> [T, hidden], after the norm before the head."""
        x = self._join(input_ids, hidden)
        x, residual = self(x, None, positions, metadata, rotary)
        post_norm, _ = self.shared_head.norm.add(x, residual)
        return post_norm

    def write_kv(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding,
    ) -> None:
        """What `predict` leaves in the cache, and nothing else of it."""
        x = self.input_layernorm(self._join(input_ids, hidden))
        attention = self.self_attn
        assert isinstance(attention, DeepseekV2Attention)
        attention.write_kv(x, positions, metadata, rotary)

    def _join(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[T] and [T, hidden] -> [T, hidden], the decoder layer's input."""
        embeds = self.enorm(self._embedding[0](input_ids))
        joined: torch.Tensor = self.eh_proj(torch.cat((embeds, self.hnorm(hidden)), dim=-1))
        return joined

    def compute_logits(self, post_norm: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab]."""
        logits: torch.Tensor = self._head[0](post_norm)
        return logits


class DeepseekMTP(nn.Module):
    """All prediction layers of a target; draft step i takes the output of layer i modulo n.

    Row t pairs the hidden state at position t with token t + 1 and sits at position t; its
    logits are those of token t + 2. Every layer computes every row, so that each has the keys
    of all positions when its turn comes. In training, layer j > 0 saw at a position the output
    of layer j - 1 at the position before; here it sees the target's own state, which stands for
    the same next token: the former would have to be kept for every cached prefix. No published
    checkpoint of this architecture has a second layer.
    """

    def __init__(
        self, target: DeepseekV3ForCausalLM, parts: Sequence[MTPParts], context: LayerContext
    ) -> None:
        super().__init__()
        first = target.config.num_hidden_layers
        self._layers = {
            i: MTPLayer(target, i, part, context) for i, part in enumerate(parts, start=first)
        }
        # Nested as in the checkpoint, so that what is missing is named as it is called there.
        layers = nn.ModuleDict({str(i): layer for i, layer in self._layers.items()})
        self.model = nn.ModuleDict({"layers": layers})
        self._rotary = target.model.rotary
        self._target_mapping = target.weight_mapping
        self._prefix = target.prefix

    @property
    def weight_mapping(self) -> WeightMapping:
        """From the target's own checkpoint; everything before these layers is the target's."""
        target = self._target_mapping
        layers = rf"{re.escape(self._prefix)}model\.layers"
        ids = "|".join(str(i) for i in self._layers)
        ignored = [rf"(?!{layers}\.({ids})\.).*", r".*\.rotary_emb\.inv_freq"]
        for i, layer in self._layers.items():
            if not layer.parts.embed_tokens:
                ignored.append(rf"{layers}\.{i}\.embed_tokens\.weight")
            if not layer.parts.head:
                ignored.append(rf"{layers}\.{i}\.shared_head\.head\.weight")
        return WeightMapping(target.renames, target.packed, tuple(ignored))

    def forward(
        self,
        step: int,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """One causal pass that writes every layer's KV.

        Args:
            step: which draft it is for, from 0.
            input_ids: [T] the token after each row's position.
            hidden: [T, hidden] the target's after its final norm, or the step before's output.
            positions: [T] of the hidden states.

        Returns:
            [T, hidden] for `compute_logits` and for the next step.
        """
        outputs = [
            layer.predict(input_ids, hidden, positions, metadata, self._rotary)
            for layer in self._layers.values()
        ]
        return outputs[step % len(outputs)]

    def write_kv(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """What `forward` leaves in the caches: a layer's depends on no other layer."""
        for layer in self._layers.values():
            layer.write_kv(input_ids, hidden, positions, metadata, self._rotary)

    def compute_logits(self, step: int, post_norm: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of draft `step` -> [R, vocab]."""
        layer = tuple(self._layers.values())[step % len(self._layers)]
        return layer.compute_logits(post_norm)
