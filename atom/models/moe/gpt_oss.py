"""gpt-oss: sinks beside the keys, windows in turn, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from atom.model_ops.attention.sinks import HeadSinks
from atom.model_ops.gates import ClampedGate
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Sublayer
from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.rounding import Rows, unrounded
from atom.model_ops.routing import Routing
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from atom.models.moe.deepseek_v2 import expect

# In the files they are beside the projections.
_MODULES = {"sinks": "attn.sinks.weight"}


class GptOssAttention(LlamaAttention):
    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id)

    @staticmethod
    def create_sinks(config: PretrainedConfig, context: LayerContext) -> HeadSinks | None:
        return HeadSinks(config.num_attention_heads, context)


class GptOssRouter(nn.Module):
    """Chooses each token's experts by logits with a bias, weighted by the softmax over the chosen.

    That is the softmax over all, renormalised.
    """

    def __init__(self, config: PretrainedConfig, routing: Routing, context: LayerContext) -> None:
        super().__init__()
        size, experts = config.hidden_size, routing.num_experts
        self.routing = routing
        self.weight = context.empty(experts, size)
        self.bias = context.empty(experts)
        self._linear = context.ops.resolve_weights(
            "linear", context.dtype, None, in_features=size, out_features=experts
        ).function
        self._route = context.ops.resolve(
            "moe_route",
            torch.float32,
            num_experts=experts,
            top_k=routing.top_k,
            num_groups=routing.num_groups,
            softmax=True,
            pair_scores=False,
            has_bias=False,
            has_shared=False,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> weights [T, k] float32, expert ids [T, k]."""
        logits = self._linear(x, self.weight, self.bias).float()
        out: tuple[torch.Tensor, torch.Tensor] = self._route(logits, None, self.routing)
        return out


class GptOssMoE(Sublayer):
    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str) -> None:
        super().__init__()
        expect(config, "hidden_act", "silu")
        routing = Routing(
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            scoring="softmax",
            renormalize=True,
        )
        self.router = GptOssRouter(config, routing, context)
        self.experts = FusedMoE(
            routing.num_experts,
            routing.visits,
            config.hidden_size,
            config.intermediate_size,
            context,
            f"{prefix}.experts",
            gate=ClampedGate(config.swiglu_alpha, config.swiglu_limit),
        )

    @property
    def reader(self) -> FusedMoE:
        return self.experts

    def forward(self, x: Rows) -> torch.Tensor:
        out: torch.Tensor = self.experts(x, *self.router(unrounded(x)))
        return out


class GptOssDecoderLayer(LlamaDecoderLayer):
    attention_class = GptOssAttention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> Sublayer:
        return GptOssMoE(config, context, prefix)


class GptOssForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `gpt_oss`."""

    layer_class = GptOssDecoderLayer

    @property
    def weight_mapping(self) -> WeightMapping:
        return replace(super().weight_mapping, modules=_MODULES)
