"""OLMo 2: norms behind attention and MLP instead of before them, and on all of q and k."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import SplitRMSNorm, SummedRMSNorm
from atom.model_ops.linear import kv_share, share_of
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    head_size,
)

_MODULES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


class Olmo2Attention(LlamaAttention):
    """Applies an RMS norm to all heads of q together, and to those of k, before RoPE."""

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        group, size, eps = context.group, head_size(config), config.rms_norm_eps
        queries = share_of(group, config.num_attention_heads * size, "num_attention_heads")
        keys = kv_share(group, config.num_key_value_heads, size)
        self.q_norm = SplitRMSNorm(queries, eps, context)
        self.k_norm = SplitRMSNorm(keys, eps, context)

    def prepare_queries(self, q: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.q_norm(q.flatten(1))
        return normed.view(q.shape)

    def prepare_keys(self, k: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.k_norm(k.flatten(1))
        return normed.view(k.shape)


class Olmo2DecoderLayer(LlamaDecoderLayer):
    """Attention and MLP read what was added so far as it is."""

    is_whole = True

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        nn.Module.__init__(self)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Olmo2Attention(config, layer_id, context, f"{prefix}.self_attn")
        self.mlp = self.create_mlp(config, layer_id, context, f"{prefix}.mlp")
        self.post_self_attn_layernorm = SummedRMSNorm(size, eps, context)
        self.post_mlp_layernorm = SummedRMSNorm(size, eps, context)
        self._add = context.ops.resolve("add", context.dtype)

    def enter(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        whole = hidden if residual is None else self._add(hidden, residual)
        return whole, whole

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
        residual = self._add(self.post_self_attn_layernorm(attended), residual)
        return self.post_mlp_layernorm(self.mlp(residual)), residual


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `olmo2`."""

    layer_class = Olmo2DecoderLayer

    @property
    def weight_mapping(self) -> WeightMapping:
        return replace(super().weight_mapping, modules=_MODULES)
