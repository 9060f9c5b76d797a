"""GLM-4.5 to 4.7: DeepSeek-V3's experts, behind grouped-query attention with partial rotation, or,
in the small ones, behind its latent attention.
"""

from __future__ import annotations

import torch

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.rotary import RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import LlamaAttention, head_size
from atom.models.moe.deepseek_v2 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    TypedDecoderLayer,
)
from atom.models.phi3 import rotated_size


class Glm4MoeAttention(LlamaAttention):
    """With `use_qk_norm`, an RMS norm of each head of q and k before RoPE."""

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        self.q_norm = self.k_norm = None
        if config.use_qk_norm:
            self.q_norm = RMSNorm(head_size(config), config.rms_norm_eps, context)
            self.k_norm = RMSNorm(head_size(config), config.rms_norm_eps, context)

    @staticmethod
    def has_output_bias(config: PretrainedConfig) -> bool:
        return False

    def prepare_queries(self, q: torch.Tensor) -> torch.Tensor:
        return q if self.q_norm is None else self.q_norm(q)

    def prepare_keys(self, k: torch.Tensor) -> torch.Tensor:
        return k if self.k_norm is None else self.k_norm(k)


class Glm4MoeDecoderLayer(DeepseekV3DecoderLayer):
    attention_class = Glm4MoeAttention


class Glm4MoeForCausalLM(DeepseekV3ForCausalLM):
    """Source of names and computation: transformers' `glm4_moe`."""

    layer_class = Glm4MoeDecoderLayer

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        size = head_size(config)
        return RotaryEmbedding(config, size, context, rotary_dim=rotated_size(config))


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """Source of names and computation: transformers' `glm4_moe_lite`."""

    layer_class = TypedDecoderLayer

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        factor = config.rope_parameters.get("partial_rotary_factor", 1.0)
        if factor != 1:
            raise ConfigError(
                f"{config.model_type} with partial_rotary_factor={factor} is not supported"
            )
        return super().create_rotary(config, context)
