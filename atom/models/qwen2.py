"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from atom.models.config.model_config import PretrainedConfig
from atom.models.layers.windows import window_of_type
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM


class Qwen2Attention(LlamaAttention):
    """Its biases have no field in the configuration."""

    @staticmethod
    def has_qkv_bias(config: PretrainedConfig) -> bool:
        return True

    @staticmethod
    def has_output_bias(config: PretrainedConfig) -> bool:
        return False

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        return window_of_type(config, layer_id) if config.use_sliding_window else None


class Qwen2DecoderLayer(LlamaDecoderLayer):
    attention_class = Qwen2Attention


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Source of names and computation: transformers' `qwen2`."""

    layer_class = Qwen2DecoderLayer
