"""Qwen3: Llama with norms on queries and keys, and sliding windows on some layers."""

from __future__ import annotations

import torch

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, head_size


class Qwen3Attention(LlamaAttention):
    """Applies an RMS norm to each head of q and k before RoPE."""

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        self.q_norm = RMSNorm(head_size(config), config.rms_norm_eps, context)
        self.k_norm = RMSNorm(head_size(config), config.rms_norm_eps, context)

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id) if config.use_sliding_window else None

    def prepare_queries(self, q: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.q_norm(q)
        return normed

    def prepare_keys(self, k: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.k_norm(k)
        return normed


class Qwen3DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `qwen3`."""

    layer_class = Qwen3DecoderLayer
