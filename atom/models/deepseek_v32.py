"""DeepSeek-V3.2 in contexts where its sparse attention chooses all tokens: DeepSeek-V3 there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.rotary import RotaryEmbedding
from atom.models.deepseek_v2 import DeepseekV2ForCausalLM, TypedDecoderLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


class DeepseekV32ForCausalLM(DeepseekV2ForCausalLM):
    """Source of names and computation: transformers' `deepseek_v32`.

    Every layer has an indexer, which chooses the `index_topk` tokens that a query attends to. It is
    not implemented, and its weights are not loaded: among at most so many tokens it chooses all.

    Raises:
        ConfigError: for longer contexts.
    """

    layer_class = TypedDecoderLayer
    skipped = (r"self_attn\.indexer\..*",)

    def __init__(self, config: PretrainedConfig, context: LayerContext, prefix: str = "") -> None:
        if context.max_model_len > config.index_topk:
            raise ConfigError(
                f"{config.model_type} attends to {config.index_topk} chosen tokens (index_topk), "
                f"and its indexer, which chooses them, is not implemented; contexts of at most so "
                f"many need none. max_model_len={context.max_model_len} is longer; use "
                f"--max-model-len {config.index_topk}"
            )
        super().__init__(config, context, prefix)
        if context.device.type != "meta":  # not when it is only sketched
            logger.info(
                "%s: attention is dense and the indexers' weights (self_attn.indexer) are skipped: "
                "of %d tokens (max_model_len) they would choose all, up to %d (index_topk)",
                config.model_type,
                context.max_model_len,
                config.index_topk,
            )

    def create_rotary(self, config: PretrainedConfig, context: LayerContext) -> RotaryEmbedding:
        return RotaryEmbedding(config, config.qk_rope_head_dim, context, interleaved=True)
