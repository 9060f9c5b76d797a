"""The Eagle3 draft with multi-head or grouped-query attention."""

from __future__ import annotations

from typing import ClassVar

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.eagle3.base import Eagle3Draft, Eagle3Layer
from atom.models.eagle3.config import Eagle3Config
from atom.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, head_size


class Eagle3Attention(LlamaAttention):
    """Llama attention whose input is an embedding concatenated with a hidden state."""

    @staticmethod
    def input_size(config: PretrainedConfig) -> int:
        return 2 * int(config.hidden_size)

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        window: int | None = config.sliding_window
        return window


class DeeperAttention(LlamaAttention):
    """Llama attention of the layers after the first one."""

    @staticmethod
    def sliding_window(config: PretrainedConfig, layer_id: int) -> int | None:
        window: int | None = config.sliding_window
        return window


class DeeperLayer(LlamaDecoderLayer):
    """A Llama layer on top of an Eagle3 layer."""

    attention_class = DeeperAttention

    def create_mlp(
        self, config: PretrainedConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> LlamaMLP:
        return LlamaMLP(config, config.intermediate_size, context, prefix, bias=config.mlp_bias)


class LlamaForCausalLMEagle3(Eagle3Draft):
    """Source of names: the checkpoints of this architecture."""

    packed_attention: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def create_layer(self, config: Eagle3Config, context: LayerContext) -> Eagle3Layer:
        attention = Eagle3Attention(config.network, 0, context, "midlayer.self_attn")
        rotary = RotaryEmbedding(config.network, head_size(config.network), context)
        return Eagle3Layer(config, attention, rotary, context)

    def create_deeper_layers(
        self, config: Eagle3Config, context: LayerContext
    ) -> tuple[LlamaDecoderLayer, ...]:
        network = config.network
        return tuple(
            DeeperLayer(network, i, context, f"layers.{i}")
            for i in range(1, network.num_hidden_layers)
        )
