"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention (DSA)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NoReturn

import torch

from atom.config import ConfigError
from atom.model_ops.attention.metadata import DRAFT_CHOICE, AttentionMetadata
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.attention.sparse import Indexer, SparseMLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import LinearBase
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.moe.deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2ForCausalLM,
    TypedDecoderLayer,
)

# What the last indexer of a pass chose, for layers that share it.
_CHOSEN = "chosen tokens"


class DeepseekV32Attention(DeepseekV2Attention):
    """MLA to the tokens that an indexer chooses: the layer's own, or that of a layer before.

    A prediction layer may reuse its choice for a first draft in the passes for those behind it
    (`index_share_for_mtp_iteration`), whose own tokens are not among it.

    Attributes:
        indexer: None in a layer that shares the choice of the last one that has one.
        is_shared: whether the next layer shares this one's choice.
    """

    mla_class: ClassVar[type[MLAAttention]] = SparseMLAAttention
    # Of the indexer; the rest of the layer rotates pairs of neighbours.
    interleaved: ClassVar[bool] = False
    attn: SparseMLAAttention

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        if config.index_head_dim < config.qk_rope_head_dim:
            raise ConfigError(
                f"{config.model_type} with index_head_dim={config.index_head_dim}: it should be at "
                f"least qk_rope_head_dim={config.qk_rope_head_dim}, which is rotated"
            )
        drafts = layer_id >= config.num_hidden_layers
        self._keeps_choice = drafts and getattr(config, "index_share_for_mtp_iteration", False)
        if self._keeps_choice and config.num_nextn_predict_layers != 1:
            raise ConfigError(
                f"{config.model_type} with index_share_for_mtp_iteration and "
                f"num_nextn_predict_layers={config.num_nextn_predict_layers} is not supported; one "
                f"prediction layer is"
            )
        self.indexer = None
        self.is_shared = shares_choice(config, layer_id + 1)
        if not shares_choice(config, layer_id):
            self.indexer = Indexer(
                config.index_topk,
                config.index_n_heads,
                config.index_head_dim,
                config.q_lora_rank,
                self.input_size(config),
                self.interleaved,
                context,
                f"{prefix}.indexer",
            )

    @property
    def reader(self) -> LinearBase | None:
        return super().reader if self.indexer is None else None

    @property
    def reader_of_queries(self) -> LinearBase | None:
        return None  # the indexer is another one

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        low, latent, k_rope = self._project_down(x)
        metadata = inputs.metadata
        chosen: AttentionMetadata | None
        if self.indexer is None:
            chosen = metadata.derive(_CHOSEN, _nothing_to_share)
        elif self._keeps_choice and metadata.draft_choice is not None:
            chosen = metadata.draft_choice
            self.indexer.write(x, inputs)
        else:
            chosen = self.indexer(x, unrounded(low), inputs)
            if self.is_shared:
                metadata.leave(_CHOSEN, chosen)
            if self._keeps_choice:
                metadata.leave(DRAFT_CHOICE, chosen)
        rows = self._queries(low), latent, k_rope, self.kv_b_proj.by_head()
        out: torch.Tensor = self.o_proj(self.attn.attend_to(chosen, *rows, inputs))
        return out

    def write_kv(self, x: Rows, inputs: AttentionInputs) -> None:
        super().write_kv(x, inputs)
        if self.indexer is not None:
            self.indexer.write(x, inputs)


class DeepseekV32DecoderLayer(TypedDecoderLayer):
    attention_class = DeepseekV32Attention


class DeepseekV32ForCausalLM(DeepseekV2ForCausalLM):
    """Source of names and computation: transformers' `deepseek_v32`."""

    layer_class = DeepseekV32DecoderLayer
    needed: ClassVar[tuple[str, ...]] = (*DeepseekV2ForCausalLM.needed, "q_lora_rank")

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        return RotaryEmbedding(config, config.qk_rope_head_dim, context, interleaved=True)


class GlmMoeDsaAttention(DeepseekV32Attention):
    interleaved = True


class GlmMoeDsaDecoderLayer(DeepseekV32DecoderLayer):
    attention_class = GlmMoeDsaAttention


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """Source of names and computation: transformers' `glm_moe_dsa`."""

    layer_class = GlmMoeDsaDecoderLayer

    @property
    def weight_mapping(self) -> WeightMapping:
        """Without the indexers of layers that share a choice, which a checkpoint may have."""
        mapping, count = super().weight_mapping, self.config.num_hidden_layers
        ignored = (
            rf"{self._layers}\.{i}\.self_attn\.indexer\..*"
            for i in range(count)
            if shares_choice(self.config, i)
        )
        return replace(mapping, ignored=(*mapping.ignored, *ignored))


def shares_choice(config: PretrainedConfig, layer_id: int) -> bool:
    """Whether a layer has no indexer; those of prediction, and what is behind the last, have one.

    Raises:
        ConfigError: for another type of indexer than `full` and `shared`, or a first one that is
            shared.
    """
    kinds = getattr(config, "indexer_types", None)  # not in every family
    if kinds is None or layer_id >= config.num_hidden_layers:
        return False
    kind = kinds[layer_id]
    if kind not in ("full", "shared") or (kind == "shared" and layer_id == 0):
        raise ConfigError(
            f"indexer_types says {kind!r} of layer {layer_id}; supported are full and shared, and "
            f"the first layer has none to share"
        )
    return bool(kind == "shared")


def _nothing_to_share() -> NoReturn:
    raise RuntimeError("a layer that shares the choice of tokens ran before any that chooses")
