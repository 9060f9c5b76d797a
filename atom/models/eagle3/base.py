"""The common part of Eagle3 drafts, independent of the kind of attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from atom.model_ops.attention.metadata import ModelInput
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm, RMSNorm
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.rotary import AttentionInputs, Rotation
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.eagle3.config import Eagle3Config
from atom.models.eagle3.parts import DraftParts
from atom.models.eagle3.sharing import SharingDraft
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from atom.models.moe.deepseek_v2 import DeepseekV2Attention


class Eagle3Layer(nn.Module):
    """The draft's decoder layer; its input is the embedding concatenated with the hidden state."""

    def __init__(
        self,
        config: Eagle3Config,
        attention: LlamaAttention | DeepseekV2Attention,
        rotary: Rotation,
        context: LayerContext,
    ) -> None:
        super().__init__()
        network = config.network
        size, eps = config.hidden_size, network.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps, context)
        self.hidden_norm = RMSNorm(size, eps, context)
        self._norm = context.ops.resolve("rms_norm", context.dtype, size=size)
        self._beside = context.ops.resolve("rms_norm_beside", context.dtype, size=size)
        self.self_attn = attention
        self.mlp = LlamaMLP(
            network, network.intermediate_size, context, "midlayer.mlp", bias=network.mlp_bias
        )
        self.post_attention_layernorm = ResidualRMSNorm(size, eps, context, self.mlp.reader)
        self.rotary = rotary

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embeds, hidden [T, hidden] -> this rank's part of a sum, and the residual, whose sum is
        the layer's output.
        """
        x, normed = self._normed(embeds, hidden)
        residual = normed if self.norm_before_residual else hidden
        attended = self.self_attn(x, inputs)
        fed, residual = self.post_attention_layernorm.feed(attended, residual)
        return self.mlp(fed), residual

    def write_kv(self, embeds: torch.Tensor, hidden: torch.Tensor, inputs: AttentionInputs) -> None:
        """Write the KV cache like `forward`, without computing its output."""
        x, _ = self._normed(embeds, hidden)
        self.self_attn.write_kv(x, inputs)

    def _normed(
        self, embeds: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's input [T, 2 hidden], and the norm of the hidden state in it."""
        weights = self.input_layernorm.weight, self.hidden_norm.weight
        out: tuple[torch.Tensor, torch.Tensor]
        out = self._beside(embeds, hidden, *weights, self.input_layernorm.eps, self._norm)
        return out


class Eagle3Draft(SharingDraft):
    """A draft that predicts the token after next from the target's hidden states.

    The row at position t combines the hidden state at t with token t + 1; its logits are for token
    t + 2. Source: the EAGLE-3 paper (arXiv 2503.01840) and the published checkpoints.

    Attributes:
        packed_attention: fused attention modules, and the checkpoint modules that they stack.
        aux_layer_ids: boundary ids of the target's hidden states that `fuse` reads, in order.
    """

    # Checkpoints name the layer `midlayer` or `layers.0`, some with the prefix `model.`.
    renames: ClassVar = (
        ("model.layers.0.", "midlayer."),
        ("layers.0.", "midlayer."),
        ("model.", ""),
    )
    packed_attention: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(
        self,
        config: Eagle3Config,
        parts: DraftParts,
        aux_layer_ids: tuple[int, ...],
        context: LayerContext,
    ) -> None:
        super().__init__(config, parts, context)
        self.config = config
        self.aux_layer_ids = aux_layer_ids
        size, eps = config.hidden_size, config.network.rms_norm_eps
        self.fc = ReplicatedLinear(config.fc_fan_in, size, False, context, "fc")
        self.input_norm: RMSNorm | None = None
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.fc_fan_in, eps, context)
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps, context)
                for _ in range(config.num_aux_hidden_states)
            )
        self.midlayer = self.create_layer(config, context)
        self._deeper = self.create_deeper_layers(config, context)
        if self._deeper:
            # By their number in the checkpoint.
            self.layers = nn.ModuleDict({str(i + 1): m for i, m in enumerate(self._deeper)})
        if config.mask_token_id is not None:
            self.mask_hidden = context.empty(1, 1, config.fc_fan_in)
        self.norm = ResidualRMSNorm(size, eps, context)

    @abstractmethod
    def create_layer(self, config: Eagle3Config, context: LayerContext) -> Eagle3Layer:
        """The decoder layer with this architecture's attention."""

    def create_deeper_layers(
        self, config: Eagle3Config, context: LayerContext
    ) -> tuple[LlamaDecoderLayer, ...]:
        """The layers after the first one, if there are any."""
        return ()

    @property
    def weight_mapping(self) -> WeightMapping:
        return WeightMapping(
            renames=self.renames,
            packed={**self.packed_attention, "gate_up_proj": ("gate_proj", "up_proj")},
            # t2d is redundant: d2t also says which target tokens the draft knows.
            ignored=(r"(model\.)?t2d", r".*\.rotary_emb\.inv_freq"),
        )

    def fuse(self, aux_hidden_states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Combine the target's hidden states: n of [T, target_hidden] -> [T, hidden]."""
        if self.fc_norm is not None:
            aux_hidden_states = tuple(
                norm(state) for norm, state in zip(self.fc_norm, aux_hidden_states, strict=True)
            )
        states = torch.cat(aux_hidden_states, dim=-1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        fused: torch.Tensor = self.fc(states)
        return fused

    def fuse_mask(self) -> torch.Tensor:
        """What stands for the target's hidden states in a parallel draft's mask rows, [hidden]."""
        parts = self.mask_hidden.view(1, -1).chunk(self.config.num_aux_hidden_states, dim=-1)
        return self.fuse(parts)[0]

    def forward(self, rows: ModelInput, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One causal pass, which writes the draft's KV.

        Args:
            rows: T of them, each with the token after its position; images are for a draft that
                reads these.
            hidden: [T, hidden], of the positions; from `fuse`, or the previous step.

        Returns:
            What the head reads, and what the next draft step does, both [T, hidden].
        """
        inputs = AttentionInputs(rows.positions, rows.attention, self.midlayer.rotary)
        embeds = self.embed(rows.input_ids)
        if rows.images is not None:
            embeds = rows.images.fill(embeds)
        x, residual = self.midlayer(embeds, hidden, inputs)
        for layer in self._deeper:
            x, residual = layer.enter(x, residual)
            x, residual = layer(x, residual, inputs)
        normed, total = self.norm.add(x, residual)
        return normed, normed if self.config.norm_output else total

    def write_kv(self, rows: ModelInput, hidden: torch.Tensor) -> None:
        """Write the KV cache like `forward`; the last layer computes only keys and values."""
        inputs = AttentionInputs(rows.positions, rows.attention, self.midlayer.rotary)
        embeds = self.embed(rows.input_ids)
        if rows.images is not None:
            embeds = rows.images.fill(embeds)
        if not self._deeper:
            self.midlayer.write_kv(embeds, hidden, inputs)
            return
        x, residual = self.midlayer(embeds, hidden, inputs)
        *between, last = self._deeper
        for layer in between:
            x, residual = layer.enter(x, residual)
            x, residual = layer(x, residual, inputs)
        x, _ = last.enter(x, residual)
        attention = last.self_attn
        assert isinstance(attention, LlamaAttention)
        attention.write_kv(x, inputs)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, draft_vocab_size] float32."""
        logits: torch.Tensor = self.head(states)
        return logits
