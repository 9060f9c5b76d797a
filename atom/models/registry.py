"""Which class runs which architecture."""

from __future__ import annotations

import importlib

from torch import nn
from transformers import PretrainedConfig

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext

_MODELS = {
    "LlamaForCausalLM": "atom.models.llama",
    "Qwen3ForCausalLM": "atom.models.qwen3",
}


def create_model(config: PretrainedConfig, context: LayerContext) -> nn.Module:
    """Build the model that `config.architectures` names, weights uninitialised.

    Raises:
        ConfigError: naming the architecture and the supported ones.
    """
    names = config.architectures or []
    known = [name for name in names if name in _MODELS]
    if not known:
        raise ConfigError(
            f"architecture {', '.join(names) or '(none given)'} is not supported; supported are "
            f"{', '.join(_MODELS)}"
        )
    model_class = getattr(importlib.import_module(_MODELS[known[0]]), known[0])
    model: nn.Module = model_class(config, context)
    return model
