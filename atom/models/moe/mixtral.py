"""Mixtral: Mistral with a mixture of experts instead of MLPs."""

from __future__ import annotations

from dataclasses import replace

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.moe_block import SoftmaxMoE
from atom.models.mistral import MistralDecoderLayer, MistralForCausalLM

# As published; transformers itself has the names on the right.
EXPERT_MODULES = {
    "block_sparse_moe": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}


class MixtralDecoderLayer(MistralDecoderLayer):
    """The chosen experts' scores are divided by their sum."""

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return SoftmaxMoE(
            config, config.num_local_experts, config.intermediate_size, True, context, prefix
        )


class MixtralForCausalLM(MistralForCausalLM):
    """Source of names and computation: transformers' `mixtral`."""

    layer_class = MixtralDecoderLayer

    @property
    def weight_mapping(self) -> WeightMapping:
        return replace(super().weight_mapping, modules=EXPERT_MODULES)
