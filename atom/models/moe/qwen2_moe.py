"""Qwen2-MoE: Qwen2 with routed experts and one that every token visits behind a gate."""

from __future__ import annotations

from typing import ClassVar

import torch

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.moe_block import SoftmaxMoE
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from atom.models.moe.qwen3_moe import has_experts


class Qwen2MoeAttention(LlamaAttention):
    """Its windows are refused: transformers' code has them in the mask alone."""

    @staticmethod
    def has_qkv_bias(config: PretrainedConfig) -> bool:
        return bool(config.qkv_bias)

    @staticmethod
    def has_output_bias(config: PretrainedConfig) -> bool:
        return False

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        if config.use_sliding_window:
            raise ConfigError("qwen2_moe with use_sliding_window is not supported")
        return None


class Qwen2MoE(SoftmaxMoE):
    """Adds the shared expert's output times the sigmoid of its gate."""

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str) -> None:
        super().__init__(
            config,
            config.num_experts,
            config.moe_intermediate_size,
            self.renormalizes(config),
            context,
            prefix,
        )
        self.shared_expert = LlamaMLP(
            config, config.shared_expert_intermediate_size, context, f"{prefix}.shared_expert"
        )
        self.shared_expert_gate = ReplicatedLinear(
            config.hidden_size, 1, False, context, f"{prefix}.shared_expert_gate"
        )
        self._add = context.ops.resolve("add", context.dtype)
        self._mul_sigmoid = context.ops.resolve("mul_sigmoid", context.dtype)

    @staticmethod
    def renormalizes(config: PretrainedConfig) -> bool:
        """Whether the chosen experts' scores are divided by their sum."""
        return bool(config.norm_topk_prob)

    def forward(self, x: Rows) -> torch.Tensor:
        rows = unrounded(x)
        routed = self.experts(x, *self.gate(rows))
        shared = self._mul_sigmoid(self.shared_expert(rows), self.shared_expert_gate(rows))
        out: torch.Tensor = self._add(shared, routed)
        return out


class Qwen2MoeDecoderLayer(LlamaDecoderLayer):
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""

    attention_class: ClassVar[type[Sublayer]] = Qwen2MoeAttention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        if has_experts(config, layer_id):
            return Qwen2MoE(config, context, prefix)
        return super().create_mlp(config, layer_id, context, prefix)


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `qwen2_moe`."""

    layer_class = Qwen2MoeDecoderLayer
