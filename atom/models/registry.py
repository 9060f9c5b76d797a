"""The model class of each architecture."""

from __future__ import annotations

import importlib

from transformers import PretrainedConfig

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM

# Architecture -> module and class.
_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "KimiK25ForConditionalGeneration": ("kimi_k25", "KimiK25ForConditionalGeneration"),
    # transformers' name of the same architecture.
    "Kimi_K25ForConditionalGeneration": ("kimi_k25", "KimiK25ForConditionalGeneration"),
}


def create_model(config: PretrainedConfig, context: LayerContext) -> CausalLM:
    """Build the model for `config.architectures`, weights uninitialised.

    Raises:
        ConfigError: with the architecture and the supported ones.
    """
    names = config.architectures or []
    known = [name for name in names if name in _MODELS]
    if not known:
        raise ConfigError(
            f"architecture {', '.join(names) or '(none given)'} is not supported; supported are "
            f"{', '.join(_MODELS)}"
        )
    module, name = _MODELS[known[0]]
    model_class = getattr(importlib.import_module(f"atom.models.{module}"), name)
    model: CausalLM = model_class(config, context)
    return model
