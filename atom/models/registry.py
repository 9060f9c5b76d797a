"""The model class of each architecture."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class _Model:
    """Attributes:
    module: in this package.
    name: of the class.
    model_types: those of configurations that mean this arithmetic.
    """

    module: str
    name: str
    model_types: tuple[str, ...]


def model_types() -> dict[str, tuple[str, ...]]:
    """The types of configurations that go with each architecture."""
    return {name: model.model_types for name, model in _MODELS.items()}


_KIMI_K25 = _Model("kimi_k25", "KimiK25ForConditionalGeneration", ("kimi_k25",))
_MODELS = {
    "LlamaForCausalLM": _Model("llama", "LlamaForCausalLM", ("llama",)),
    "Qwen3ForCausalLM": _Model("qwen3", "Qwen3ForCausalLM", ("qwen3",)),
    "DeepseekV2ForCausalLM": _Model("deepseek_v2", "DeepseekV2ForCausalLM", ("deepseek_v2",)),
    "DeepseekV3ForCausalLM": _Model(
        "deepseek_v2", "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2")
    ),
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,  # transformers' spelling of the same
    "DeepseekV32ForCausalLM": _Model("deepseek_v32", "DeepseekV32ForCausalLM", ("deepseek_v32",)),
    "Qwen2ForCausalLM": _Model("qwen2", "Qwen2ForCausalLM", ("qwen2",)),
    "Qwen2MoeForCausalLM": _Model("qwen2_moe", "Qwen2MoeForCausalLM", ("qwen2_moe",)),
    "Qwen3MoeForCausalLM": _Model("qwen3_moe", "Qwen3MoeForCausalLM", ("qwen3_moe",)),
    "MistralForCausalLM": _Model("mistral", "MistralForCausalLM", ("mistral",)),
    "MinistralForCausalLM": _Model("mistral", "MinistralForCausalLM", ("ministral",)),
    "MixtralForCausalLM": _Model("mixtral", "MixtralForCausalLM", ("mixtral",)),
    "SmolLM3ForCausalLM": _Model("smollm3", "SmolLM3ForCausalLM", ("smollm3",)),
    "Olmo2ForCausalLM": _Model("olmo2", "Olmo2ForCausalLM", ("olmo2",)),
    "GraniteForCausalLM": _Model("granite", "GraniteForCausalLM", ("granite",)),
    "Phi3ForCausalLM": _Model("phi3", "Phi3ForCausalLM", ("phi3",)),
    "Gemma3ForCausalLM": _Model("gemma3", "Gemma3ForCausalLM", ("gemma3_text",)),
    "Glm4ForCausalLM": _Model("glm4", "Glm4ForCausalLM", ("glm4",)),
    "Glm4MoeForCausalLM": _Model("glm4_moe", "Glm4MoeForCausalLM", ("glm4_moe",)),
    "Glm4MoeLiteForCausalLM": _Model("glm4_moe", "Glm4MoeLiteForCausalLM", ("glm4_moe_lite",)),
    "MiniMaxM2ForCausalLM": _Model("minimax_m2", "MiniMaxM2ForCausalLM", ("minimax_m2",)),
}
# Architectures that are known and not supported, and what is missing.
_MISSING = {
    "Qwen3NextForCausalLM": "its linear attention (Gated DeltaNet), which keeps a state for each "
    "sequence instead of keys and values, and its format of prediction layers (mtp.fc, "
    "mtp.layers.0, mtp.norm)",
}


def known_architecture(architectures: object, model_type: object) -> str:
    """The first architecture that has a model class, of those that a `config.json` names.

    Raises:
        ConfigError: naming them, what is missing if it is known, and the supported ones.
    """
    listed = architectures if isinstance(architectures, list) else []
    names = [name for name in listed if isinstance(name, str)]
    for name in names:
        if name in _MODELS:
            return name
    missing = "".join(f": missing is {_MISSING[name]}" for name in names if name in _MISSING)
    raise ConfigError(
        f"architecture {', '.join(names) or '(none given)'} is not supported (type {model_type})"
        f"{missing}; supported are {', '.join(_MODELS)}"
    )


def create_model(config: PretrainedConfig, context: LayerContext) -> CausalLM:
    """Build the model for `config.architectures`, weights uninitialised.

    Raises:
        ConfigError: naming the architecture and the supported ones, or a model type that
            contradicts it.
    """
    name = known_architecture(config.architectures, config.model_type)
    model = _MODELS[name]
    if config.model_type not in model.model_types:
        raise ConfigError(
            f"model_type {config.model_type!r} contradicts architecture {name}, which goes "
            f"with {' or '.join(model.model_types)}: another type may compute something else "
            f"(windows, multipliers) from the same weights. Correct config.json, if the model "
            f"is what its architecture says"
        )
    model_class = getattr(importlib.import_module(f"atom.models.{model.module}"), model.name)
    created: CausalLM = model_class(config, context)
    return created
