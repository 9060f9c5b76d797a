"""Block drafters: DFlash, DFlash2 and DSpark."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from atom.model_ops.attention.metadata import AttentionMetadata
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm, RMSNorm
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.block_draft.config import BlockDraftConfig
from atom.models.block_draft.heads import CandidateSelector, ConfidenceHead, MarkovHead, PathHead
from atom.models.block_draft.layers import BlockDraftLayer
from atom.models.eagle3.parts import DraftParts
from atom.models.eagle3.sharing import SharingDraft
from atom.models.moe.deepseek_v2 import PACKED_ATTENTION


class BlockDraft(SharingDraft):
    """Drafts a block of tokens in one pass.

    The target's hidden states of confirmed tokens are projected into keys and values of every
    layer. The block is the newest token, the anchor, and masks after it; its rows see the context
    and each other. Source: the DFlash and DSpark papers and checkpoints.

    Attributes:
        aux_layer_ids: boundary ids of the target's hidden states that `fuse` reads, in order.
    """

    renames: ClassVar = (
        ("model.", ""),
        # Names of drafts with latent attention.
        ("context_proj.", "fc."),
        ("context_norm.", "hidden_norm."),
        ("final_norm.", "norm."),
    )

    def __init__(
        self,
        config: BlockDraftConfig,
        parts: DraftParts,
        aux_layer_ids: tuple[int, ...],
        context: LayerContext,
    ) -> None:
        super().__init__(config, parts, context)
        self.config = config
        self.aux_layer_ids = aux_layer_ids
        network = config.network
        size, eps = config.hidden_size, network.rms_norm_eps
        self.fc = ReplicatedLinear(config.fc_fan_in, size, False, context, "fc")
        self.hidden_norm = RMSNorm(size, eps, context)
        self._layers = tuple(
            BlockDraftLayer(config, i, context, f"layers.{i}")
            for i in range(network.num_hidden_layers)
        )
        self.layers = nn.ModuleList(self._layers)
        self.norm = ResidualRMSNorm(size, eps, context)
        # The size of latent attention's rotated part is its head_dim.
        self.rotary = RotaryEmbedding(network, network.head_dim, context, config.interleaved)
        head = PathHead()
        if config.markov is not None:
            self.markov_head = head = MarkovHead(config, config.markov, context)
        if config.selector is not None:
            head = CandidateSelector(config, config.selector, context)
            self.candidate_selector = head
        # In a tuple, so that it is not registered a second time.
        self._path_head = (head,)
        if config.confidence is not None:
            markov = config.markov if config.confidence.with_markov else None
            self.confidence_head = ConfidenceHead(config, markov, context)

    @property
    def weight_mapping(self) -> WeightMapping:
        return WeightMapping(
            renames=self.renames,
            packed={
                "kv_proj": ("k_proj", "v_proj"),
                "gate_up_proj": ("gate_proj", "up_proj"),
                **(PACKED_ATTENTION if self.config.format.has_latents else {}),
            },
            # t2d is redundant: d2t also says which target tokens the draft knows.
            ignored=(r"(model\.)?t2d", r".*\.rotary_emb\.inv_freq", *self._copies),
        )

    @property
    def _copies(self) -> tuple[str, ...]:
        """Tensors that are copies of the target's."""
        if not self.config.format.has_latents:
            return ()
        return (r"(model\.)?(embed_tokens|lm_head)\.weight",)

    def fuse(self, aux_hidden_states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Combine the target's hidden states: n of [T, target_hidden] -> [T, hidden]."""
        fused: torch.Tensor = self.hidden_norm(self.fc(torch.cat(aux_hidden_states, dim=-1)))
        return fused

    def write_context(
        self, states: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """Write every layer's keys and values of rows that the target computed.

        Args:
            states: [T, hidden], from `fuse`.
            positions: [T].
        """
        inputs = AttentionInputs(positions, metadata, self.rotary)
        for layer in self._layers:
            layer.self_attn.write_context(states, inputs)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """The pass over S blocks, the last rows of their sequences' contexts.

        Args:
            input_ids, positions: [S * block_size].

        Returns:
            [S * block_size, hidden], after the final norm.
        """
        hidden = self.embed(input_ids)
        if self.config.embedding_scale != 1:
            hidden = hidden * self.config.embedding_scale
        inputs = AttentionInputs(positions, metadata, self.rotary)
        residual: torch.Tensor | None = None
        for layer in self._layers:
            hidden, residual = layer(hidden, residual, inputs)
        assert residual is not None
        normed, _ = self.norm.add(hidden, residual)
        return normed

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, draft vocabulary] float32, without what the path adds."""
        logits: torch.Tensor = self.head(states)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        if self.config.softcap is not None:
            logits = (logits / self.config.softcap).tanh() * self.config.softcap
        return logits

    @property
    def path(self) -> PathHead:
        """The head that chooses along the block."""
        return self._path_head[0]

    def confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor | None:
        """Of the drafts of rows [S, hidden] after tokens [S] -> [S] float32; None without a head
        for it.
        """
        kind = self.config.confidence
        if kind is None:
            return None
        vectors = self.markov_head.markov_w1(previous) if kind.with_markov else None
        confidence: torch.Tensor = self.confidence_head(states, vectors)
        return confidence
