"""Attention whose output is multiplied by a gate of its input."""

from __future__ import annotations

import torch

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs
from atom.models.config.model_config import PretrainedConfig
from atom.models.qwen3 import Qwen3Attention


class GatedAttention(Qwen3Attention):
    """Qwen3's, times the sigmoid of a gate for each element, projected with the queries."""

    has_output_gate = True

    def __init__(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__(config, layer_id, context, prefix)
        self._mul_sigmoid = context.ops.resolve("mul_sigmoid", context.dtype)

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return None

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        gated, k, v = self.qkv_proj.split(self.qkv_proj(x))
        q, gate = self.prepare_queries(gated[:, ::2]), gated[:, 1::2].flatten(1).contiguous()
        attended = self.attn(q, self.prepare_keys(k), v, inputs)
        self._mul_sigmoid(attended.view(gate.shape), gate)
        out: torch.Tensor = self.o_proj(attended)
        return out
