"""GLM-4 (dense): a norm before and one behind attention and MLP, partial rotation of pairs."""

from __future__ import annotations

from typing import ClassVar

import torch

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer, SummedRMSNorm
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, head_size
from atom.models.phi3 import rotated_size


class Glm4Attention(LlamaAttention):
    @staticmethod
    def has_output_bias(config: PretrainedConfig) -> bool:
        return False


class Glm4DecoderLayer(LlamaDecoderLayer):
    """`post_attention_layernorm` is the one before the MLP."""

    attention_class: ClassVar[type[Sublayer]] = Glm4Attention
    is_whole = True

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.post_self_attn_layernorm = SummedRMSNorm(size, eps, context)
        self.post_mlp_layernorm = SummedRMSNorm(size, eps, context)

    def forward(
        self,
        x: Rows,
        residual: torch.Tensor,
        inputs: AttentionInputs,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended = self.self_attn(x, inputs)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        normed = self.post_self_attn_layernorm(attended)
        x, residual = self.post_attention_layernorm.feed(normed, residual)
        return self.post_mlp_layernorm(self.mlp(x)), residual


class Glm4ForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `glm4`."""

    layer_class = Glm4DecoderLayer

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        return RotaryEmbedding(
            config, head_size(config), context, interleaved=True, rotary_dim=rotated_size(config)
        )
