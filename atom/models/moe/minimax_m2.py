"""MiniMax-M2: norms on all of q and k, partial rotation, and experts chosen by sigmoid scores."""

from __future__ import annotations

from dataclasses import replace

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.moe_block import SigmoidMoE
from atom.models.llama import LlamaDecoderLayer
from atom.models.moe.deepseek_v2 import expect
from atom.models.moe.mixtral import EXPERT_MODULES
from atom.models.olmo2 import Olmo2Attention
from atom.models.phi3 import Phi3ForCausalLM

# In the files it is beside the router.
_MODULES = {**EXPERT_MODULES, "e_score_correction_bias": "gate.e_score_correction_bias"}


class MiniMaxM2Attention(Olmo2Attention):
    """Without biases."""

    @staticmethod
    def has_qkv_bias(config: PretrainedConfig) -> bool:
        return False

    @staticmethod
    def has_output_bias(config: PretrainedConfig) -> bool:
        return False


class MiniMaxM2DecoderLayer(LlamaDecoderLayer):
    """Every layer has experts."""

    attention_class = MiniMaxM2Attention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return SigmoidMoE(
            config, config.num_local_experts, config.intermediate_size, True, context, prefix
        )


class MiniMaxM2ForCausalLM(Phi3ForCausalLM):
    """Source of names and computation: transformers' `minimax_m2`."""

    layer_class = MiniMaxM2DecoderLayer

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        # Fields that published files have besides, and that the class of transformers ignores.
        expect(config, "scoring_func", "sigmoid")
        expect(config, "use_routing_bias", True)
        expect(config, "use_qk_norm", True)
        expect(config, "qk_norm_type", "per_layer")
        expect(config, "shared_intermediate_size", 0)
        expect(config, "attn_type_list", [1] * config.num_hidden_layers)
        super().__init__(config, context, prefix)

    @property
    def weight_mapping(self) -> WeightMapping:
        return replace(super().weight_mapping, modules=_MODULES)
