"""The Eagle3 draft with multi-head latent attention."""

from __future__ import annotations

from typing import ClassVar

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import RotaryEmbedding
from atom.models.config.model_config import PretrainedConfig
from atom.models.eagle3.base import Eagle3Draft, Eagle3Layer
from atom.models.eagle3.config import Eagle3Config
from atom.models.moe.deepseek_v2 import PACKED_ATTENTION, DeepseekV2Attention


class Eagle3MLAAttention(DeepseekV2Attention):
    """MLA whose input is an embedding concatenated with a hidden state."""

    @staticmethod
    def input_size(config: PretrainedConfig) -> int:
        return 2 * int(config.hidden_size)


class Eagle3DeepseekV2ForCausalLM(Eagle3Draft):
    """Source of names: the checkpoints of this architecture. Its MLP is dense."""

    packed_attention: ClassVar = PACKED_ATTENTION

    def create_layer(self, config: Eagle3Config, context: LayerContext) -> Eagle3Layer:
        network = config.network
        attention = Eagle3MLAAttention(network, 0, context, "midlayer.self_attn")
        interleaved = bool(network.rope_interleave)
        rotary = RotaryEmbedding(network, network.qk_rope_head_dim, context, interleaved)
        return Eagle3Layer(config, attention, rotary, context)
