"""Phi-3 and Phi-4: Mistral with fused projections in the files, and partial rotation."""

from __future__ import annotations

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import head_size
from atom.models.mistral import MistralForCausalLM


class Phi3ForCausalLM(MistralForCausalLM):
    """Source of names and computation: transformers' `phi3`."""

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        size = head_size(config)
        return RotaryEmbedding(config, size, context, rotary_dim=rotated_size(config))


def rotated_size(config: PretrainedConfig) -> int:
    """Elements of each head that are rotated."""
    return int(head_size(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
