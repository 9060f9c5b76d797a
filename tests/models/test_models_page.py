"""The table of `docs/models.md` is what the code serves and what the tests compare."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from models import transformers_families
from models.families import FAMILIES, TEXT_MODELS
from models.hybrids import HYBRIDS
from models.transformers_outcomes import OUTCOMES, VERSION
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from atom.model_loader.gguf.architectures import GGUF_NAMES
from atom.models.registry import model_types

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Names of families by the first model type of their architecture.
_NAMES = {
    "llama": "Llama 2, 3 and what has its architecture",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral 3 (text)",
    "mistral3": "Mistral Small 3.1 and later, Ministral 3, as text models",
    "mixtral": "Mixtral",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2",
    "granite": "Granite 3 (dense)",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "cohere": "Command R, R+ (Cohere)",
    "cohere2": "Command R7B, Command A (Cohere 2)",
    "glm4": "GLM-4 (dense)",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "MiniMax-M2",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gemma3": "Gemma 3, as a text model",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-5",
    "kimi_k25": "Kimi-K2.5, with images",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5 (text), dense",
    "qwen3_5_moe_text": "Qwen3.5 (text), with experts",
    "qwen3_5": "Qwen3.5, dense, with images",
    "qwen3_5_moe": "Qwen3.5, with experts, with images",
    "kimi_linear": "Kimi-Linear",
    "kimi_k3": "Kimi-K3, as a text model",
    "qwen2_5_vl": "Qwen2.5-VL, with images",
    "qwen3_vl": "Qwen3-VL, dense, with images",
    "qwen3_vl_moe": "Qwen3-VL, with experts, with images",
    "idefics3": "Idefics3, with images",
    "smolvlm": "SmolVLM, SmolVLM2, with images",
}
# Eagle3 drafts that their publishers name for a model of the family.
_DRAFTS = {
    "qwen3": "`AngelSlim/Qwen3-8B_eagle3`",
    "qwen3_moe": "`RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3`, "
    "`lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex`, "
    "`nvidia/Qwen3-235B-A22B-Eagle3`",
    "deepseek_v3": "MTP inside",
    "gpt_oss": "`nvidia/gpt-oss-120b-Eagle3-v3`, `RedHatAI/gpt-oss-20b-speculator.eagle3`",
    "gemma3_text": "`witcheer/gemma-3-27b-eagle3-drafter`",
    "minimax_m2": "`thoughtworks/MiniMax-M2.5-Eagle3`",
    "deepseek_v32": "MTP inside",
    "glm_moe_dsa": "MTP inside",
    "glm4_moe": "MTP inside",
    "glm4_moe_lite": "MTP inside",
    "qwen3_next": "MTP inside",
    "qwen3_5_text": "MTP inside",
    "qwen3_5_moe_text": "MTP inside",
    "qwen3_5": "MTP inside",
    "qwen3_5_moe": "MTP inside",
    "kimi_k3": "`Inferact/Kimi-K3-DSpark`",
    "kimi_k25": "`lightseekorg/kimi-k2.5-eagle3`, `AQ-MedAI/Kimi-K25-eagle3`",
}


def rows() -> list[str]:
    by_types: dict[tuple[str, ...], list[str]] = {}
    for architecture, types in model_types().items():
        by_types.setdefault(types, []).append(architecture)
    lines = ["| family | architecture | GGUF | tests | drafts |", "|---|---|---|---|---|"]
    for types, architectures in by_types.items():
        first = types[0]
        names = ", ".join(f"`{name}`" for name in architectures)
        gguf = ", ".join(f"`{name}`" for name in GGUF_NAMES.get(first, ())) or "no"
        tests = "logits, engine, drafts"
        if any(name.partition("-")[0] == first for name in [*FAMILIES, *TEXT_MODELS]):
            tests = "grid"
        elif first.removesuffix("_text") in HYBRIDS:
            tests = "hybrids"
        lines.append(f"| {_NAMES[first]} | {names} | {gguf} | {tests} | {_DRAFTS.get(first, '')} |")
    return lines


def by_transformers() -> str:
    """The sentence of families that run by transformers' modelling code."""
    names = dict.fromkeys(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in transformers_families.FAMILIES
    )
    listed = ", ".join(f"`{name}`" for name in names)
    return f"Tested with it are {len(transformers_families.FAMILIES)} families: {listed}."


def every_night() -> str:
    """The sentence of what `test_every_transformers_model.py` finds."""
    counts = Counter(OUTCOMES.values())
    return (
        f"Every night each of transformers' causal language models is tried by this code, native "
        f"families too. Of the {len(OUTCOMES)} types of version {VERSION}, {counts['equal']} are "
        f"equal and {counts['refused']} are refused by name."
    )


def test_the_counts_of_every_night_are_current() -> None:
    sentence = every_night()
    assert sentence in PAGE.read_text(encoding="utf-8"), f"docs/models.md must have\n{sentence}"


def test_the_list_of_families_by_transformers_is_current() -> None:
    sentence = by_transformers()
    assert sentence in PAGE.read_text(encoding="utf-8"), f"docs/models.md must have\n{sentence}"


def test_the_table_is_current() -> None:
    table = "\n".join(rows())
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/models.md must have\n{table}"
