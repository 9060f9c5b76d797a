"""The model class of each architecture."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.config.model_config import PretrainedConfig


@dataclass(frozen=True)
class _Model:
    """Attributes:
    module: in this package, with its folder.
    name: of the class.
    model_types: those of configurations that mean this arithmetic.
    """

    module: str
    name: str
    model_types: tuple[str, ...]


def model_types() -> dict[str, tuple[str, ...]]:
    """The types of configurations that go with each architecture."""
    return {name: model.model_types for name, model in _MODELS.items()}


_KIMI_K25 = _Model("vision_language.kimi_k25", "KimiK25ForConditionalGeneration", ("kimi_k25",))
_MODELS = {
    "LlamaForCausalLM": _Model("llama", "LlamaForCausalLM", ("llama",)),
    "Idefics3ForConditionalGeneration": _Model(
        "vision_language.idefics3", "Idefics3ForConditionalGeneration", ("idefics3",)
    ),
    "SmolVLMForConditionalGeneration": _Model(
        "vision_language.idefics3", "Idefics3ForConditionalGeneration", ("smolvlm",)
    ),
    "Qwen2_5_VLForConditionalGeneration": _Model(
        "vision_language.qwen2_5_vl", "Qwen25VLForConditionalGeneration", ("qwen2_5_vl",)
    ),
    "Qwen3VLForConditionalGeneration": _Model(
        "vision_language.qwen3_vl", "Qwen3VLForConditionalGeneration", ("qwen3_vl",)
    ),
    "Qwen3VLMoeForConditionalGeneration": _Model(
        "vision_language.qwen3_vl", "Qwen3VLMoeForConditionalGeneration", ("qwen3_vl_moe",)
    ),
    "Qwen3ForCausalLM": _Model("qwen3", "Qwen3ForCausalLM", ("qwen3",)),
    "DeepseekV2ForCausalLM": _Model("moe.deepseek_v2", "DeepseekV2ForCausalLM", ("deepseek_v2",)),
    "DeepseekV3ForCausalLM": _Model(
        "moe.deepseek_v2", "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2")
    ),
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,  # transformers' spelling of the same
    "DeepseekV32ForCausalLM": _Model(
        "moe.deepseek_v32", "DeepseekV32ForCausalLM", ("deepseek_v32",)
    ),
    "GlmMoeDsaForCausalLM": _Model("moe.deepseek_v32", "GlmMoeDsaForCausalLM", ("glm_moe_dsa",)),
    "Qwen2ForCausalLM": _Model("qwen2", "Qwen2ForCausalLM", ("qwen2",)),
    "Qwen2MoeForCausalLM": _Model("moe.qwen2_moe", "Qwen2MoeForCausalLM", ("qwen2_moe",)),
    "Qwen3MoeForCausalLM": _Model("moe.qwen3_moe", "Qwen3MoeForCausalLM", ("qwen3_moe",)),
    "MistralForCausalLM": _Model("mistral", "MistralForCausalLM", ("mistral",)),
    "MinistralForCausalLM": _Model("mistral", "MinistralForCausalLM", ("ministral",)),
    "Ministral3ForCausalLM": _Model("mistral", "Ministral3ForCausalLM", ("ministral3",)),
    "Mistral3ForConditionalGeneration": _Model(
        "mistral", "Mistral3ForConditionalGeneration", ("mistral3",)
    ),
    "MixtralForCausalLM": _Model("moe.mixtral", "MixtralForCausalLM", ("mixtral",)),
    "SmolLM3ForCausalLM": _Model("smollm3", "SmolLM3ForCausalLM", ("smollm3",)),
    "Olmo2ForCausalLM": _Model("olmo2", "Olmo2ForCausalLM", ("olmo2",)),
    "GraniteForCausalLM": _Model("granite", "GraniteForCausalLM", ("granite",)),
    "Phi3ForCausalLM": _Model("phi3", "Phi3ForCausalLM", ("phi3",)),
    "Gemma2ForCausalLM": _Model("gemma2", "Gemma2ForCausalLM", ("gemma2",)),
    "Gemma3ForCausalLM": _Model("gemma3", "Gemma3ForCausalLM", ("gemma3_text",)),
    "Gemma3ForConditionalGeneration": _Model(
        "gemma3", "Gemma3ForConditionalGeneration", ("gemma3",)
    ),
    "CohereForCausalLM": _Model("cohere", "CohereForCausalLM", ("cohere",)),
    "Cohere2ForCausalLM": _Model("cohere", "Cohere2ForCausalLM", ("cohere2",)),
    "Glm4ForCausalLM": _Model("glm4", "Glm4ForCausalLM", ("glm4",)),
    "Glm4MoeForCausalLM": _Model("moe.glm4_moe", "Glm4MoeForCausalLM", ("glm4_moe",)),
    "Glm4MoeLiteForCausalLM": _Model("moe.glm4_moe", "Glm4MoeLiteForCausalLM", ("glm4_moe_lite",)),
    "GptOssForCausalLM": _Model("moe.gpt_oss", "GptOssForCausalLM", ("gpt_oss",)),
    "MiniMaxM2ForCausalLM": _Model("moe.minimax_m2", "MiniMaxM2ForCausalLM", ("minimax_m2",)),
    "Qwen3NextForCausalLM": _Model("hybrid.qwen3_next", "Qwen3NextForCausalLM", ("qwen3_next",)),
    "Qwen3_5ForCausalLM": _Model("hybrid.qwen3_5", "Qwen35ForCausalLM", ("qwen3_5_text",)),
    "Qwen3_5MoeForCausalLM": _Model(
        "hybrid.qwen3_5", "Qwen35MoeForCausalLM", ("qwen3_5_moe_text",)
    ),
    "Qwen3_5ForConditionalGeneration": _Model(
        "hybrid.qwen3_5", "Qwen35ForConditionalGeneration", ("qwen3_5",)
    ),
    "Qwen3_5MoeForConditionalGeneration": _Model(
        "hybrid.qwen3_5", "Qwen35MoeForConditionalGeneration", ("qwen3_5_moe",)
    ),
    "KimiLinearForCausalLM": _Model(
        "hybrid.kimi_linear", "KimiLinearForCausalLM", ("kimi_linear",)
    ),
    "KimiK3ForConditionalGeneration": _Model(
        "hybrid.kimi_k3", "KimiK3ForConditionalGeneration", ("kimi_k3",)
    ),
}


# Transformers' classes with towers whose tokens were compared with transformers' own, and their
# types of configurations.
_SEEING = {
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "VipLlavaForConditionalGeneration": "vipllava",
}


@dataclass(frozen=True)
class Implementation:
    """What runs a model.

    Attributes:
        kind: `atom` for a class of this package, `transformers` for one of transformers'.
        name: of the class.
        why: this one.
        sees: whether it is transformers' class of a model that reads images.
    """

    kind: str
    name: str
    why: str
    sees: bool = False

    def __str__(self) -> str:
        where = "atom" if self.kind == "atom" else "transformers' modelling code"
        return f"{self.name} of {where}, {self.why}"


def choose_implementation(
    architectures: object, model_type: object, wanted: str = "auto"
) -> Implementation:
    """What runs a model whose `config.json` names these architectures and this type.

    Args:
        wanted: `--model-impl`.

    Raises:
        ConfigError: naming them, and what is supported.
    """
    listed = architectures if isinstance(architectures, list) else []
    names = [name for name in listed if isinstance(name, str)]
    ours = next((name for name in names if name in _MODELS), None)
    if ours is not None and wanted != "transformers":
        types = _MODELS[ours].model_types
        if wanted == "atom" or model_type in types:
            why = "as --model-impl says" if wanted == "atom" else "which is native"
            return Implementation("atom", ours, why)
    if wanted != "atom" and (theirs := _class_of_transformers(names, model_type)) is not None:
        why = "as no class of atom computes this"
        if wanted == "transformers":
            why = "as --model-impl says"
        return Implementation("transformers", theirs, why, theirs in _SEEING)
    if ours is not None and wanted != "transformers":
        return Implementation("atom", ours, "which is native")  # refused by its type
    told = f"architecture {', '.join(names) or '(none given)'} is not supported (type {model_type})"
    if wanted == "transformers":
        raise ConfigError(f"{told}: transformers has no such causal language model")
    others = "" if wanted == "atom" else ", and what transformers has as a causal language model"
    raise ConfigError(f"{told}; supported are {', '.join(_MODELS)}{others}")


def _class_of_transformers(names: list[str], model_type: object) -> str | None:
    """Transformers' causal language model for a type, if one of these names means it."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = None
    if isinstance(model_type, str):
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        seeing = _SEEING.get(names[0]) if len(names) == 1 else None
        if seeing == model_type:
            return names[0]
    for name in names:
        # Publishers' own names of what transformers has by another name.
        foreign = name.endswith("ForCausalLM") and not hasattr(transformers, name)
        if known is not None and (name == known or foreign):
            return str(known)
    return None


def create_model(config: PretrainedConfig, context: LayerContext, wanted: str = "auto") -> CausalLM:
    """Build the model for `config.architectures`, weights uninitialised.

    Args:
        wanted: `--model-impl`.

    Raises:
        ConfigError: naming the architecture and the supported ones, or a model type that
            contradicts it.
    """
    implementation = choose_implementation(config.architectures, config.model_type, wanted)
    if implementation.kind == "transformers":
        return _create_by_transformers(implementation.name, config, context)
    name = implementation.name
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


def _create_by_transformers(name: str, config: PretrainedConfig, context: LayerContext) -> CausalLM:
    import transformers

    from atom.models.transformers.model import TransformersForCausalLM

    try:
        return TransformersForCausalLM(config, context, getattr(transformers, name))
    except ConfigError as error:
        raise ConfigError(f"{name} of transformers is not supported: {error}") from None
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(f"{name} of transformers cannot be built: {told}") from error
