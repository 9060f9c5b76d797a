"""Cohere (Command R): attention and MLP side by side behind one layer norm, rotation of pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import HeadsLayerNorm, ResidualLayerNorm
from atom.model_ops.linear import kv_share, share_of
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs, NoRotation, RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, head_size


class CohereAttention(LlamaAttention):
    """With `use_qk_norm` each head of q and k is normed before RoPE."""

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        self.q_norm = self.k_norm = None
        if self.has_head_norms(config):
            group, size, eps = context.group, head_size(config), config.layer_norm_eps
            queries = share_of(group, config.num_attention_heads * size, "num_attention_heads")
            keys = kv_share(group, config.num_key_value_heads, size)
            self.q_norm = HeadsLayerNorm(queries, size, eps, context)
            self.k_norm = HeadsLayerNorm(keys, size, eps, context)

    @staticmethod
    def has_head_norms(config: PretrainedConfig) -> bool:
        return bool(config.use_qk_norm)

    def prepare_queries(self, q: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = q if self.q_norm is None else self.q_norm(q)
        return normed

    def prepare_keys(self, k: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = k if self.k_norm is None else self.k_norm(k)
        return normed


class CohereDecoderLayer(LlamaDecoderLayer):
    """Attention and MLP read the same norm; their outputs are added in one sum over the ranks."""

    attention_class = CohereAttention

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        nn.Module.__init__(self)
        self.self_attn = self.attention_class(config, layer_id, context, f"{prefix}.self_attn")
        self.mlp = self.create_mlp(config, layer_id, context, f"{prefix}.mlp")
        self.input_layernorm = self.create_final_norm(config, context)
        self._add = context.ops.resolve("add", context.dtype)

    @classmethod
    def create_final_norm(
        cls, config: PretrainedConfig, context: LayerContext
    ) -> ResidualLayerNorm:
        return ResidualLayerNorm(config.hidden_size, config.layer_norm_eps, context)

    def forward(
        self,
        x: Rows,
        residual: torch.Tensor,
        inputs: AttentionInputs,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended = self.self_attn(x, inputs)
        if rows is not None:
            assert isinstance(x, torch.Tensor)
            attended, x, residual = attended[rows], x[rows], residual[rows]
        return self._add(attended, self.mlp(x)), residual


class CohereForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `cohere`."""

    layer_class = CohereDecoderLayer

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        super().__init__(config, context, prefix)
        self._factor: float = config.logit_scale
        self._scale = context.ops.resolve("scale", torch.float32)

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        return RotaryEmbedding(config, head_size(config), context, interleaved=True)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._scale(super().compute_logits(hidden_states), self._factor)
        return logits


class Cohere2Attention(CohereAttention):
    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id)

    @staticmethod
    def has_head_norms(config: PretrainedConfig) -> bool:
        return False


class Cohere2DecoderLayer(CohereDecoderLayer):
    attention_class = Cohere2Attention


class Cohere2ForCausalLM(CohereForCausalLM):
    """Source of names and computation: transformers' `cohere2`."""

    layer_class = Cohere2DecoderLayer

    def create_rotaries(
        self, config: PretrainedConfig, context: LayerContext
    ) -> Sequence[RotaryEmbedding]:
        """Layers that attend to everything do not rotate."""
        rotary = self.create_rotary(config, context)
        still = NoRotation(config, head_size(config), context)
        kinds = config.layer_types
        return [rotary if kind == "sliding_attention" else still for kind in kinds]
