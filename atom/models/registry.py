"""Which class runs which architecture."""

from __future__ import annotations

import importlib

from transformers import PretrainedConfig

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM

_MODELS = {
    "LlamaForCausalLM": "atom.models.llama",
    "Qwen3ForCausalLM": "atom.models.qwen3",
}


def create_model(config: PretrainedConfig, context: LayerContext) -> CausalLM:
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
    model: CausalLM = model_class(config, context)
    return model
