"""Qwen3-MoE: Qwen3 with a mixture of experts instead of most MLPs."""

from __future__ import annotations

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.moe_block import SoftmaxMoE
from atom.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from atom.models.qwen3 import Qwen3Attention


class Qwen3MoeAttention(Qwen3Attention):
    """All layers have the same window, or none."""

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        window: int | None = config.sliding_window
        return window if config.use_sliding_window else None


class Qwen3MoeDecoderLayer(LlamaDecoderLayer):
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""

    attention_class = Qwen3MoeAttention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if not has_experts(config, layer_id):
            return super().create_mlp(config, layer_id, context, prefix)
        return SoftmaxMoE(
            config,
            config.num_experts,
            config.moe_intermediate_size,
            config.norm_topk_prob,
            context,
            prefix,
        )


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `qwen3_moe`."""

    layer_class = Qwen3MoeDecoderLayer


def has_experts(config: PretrainedConfig, layer_id: int) -> bool:
    """Whether a layer's second half is a mixture of experts."""
    dense = layer_id in (config.mlp_only_layers or ())
    return (
        not dense and bool(config.num_experts) and (layer_id + 1) % config.decoder_sparse_step == 0
    )
