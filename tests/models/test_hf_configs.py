"""Configurations read here against transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from atom.config import ConfigError, ModelOptions
from atom.model_loader.source import resolve_model
from atom.models.config.hf_configs import built_in_config, is_built_in

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SIZES = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "dtype": "bfloat16"}
# Fields that are others afterwards.
_RENAMED = {
    *("rope_scaling", "rope_theta", "partial_rotary_factor"),
    *("num_mtp_layers", "num_local_experts"),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
EXPERTS = {
    "n_routed_experts": 8,
    "qk_rope_head_dim": 8,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {**SIZES, "num_key_value_heads": 2, "rope_theta": 5e5}),
        ("llama", {**SIZES, "head_dim": 16, "rope_scaling": YARN, "eos_token_id": [1, 2]}),
        ("deepseek_v32", {}),
        ("deepseek_v32", {**SIZES, **EXPERTS, "rope_scaling": YARN, "num_nextn_predict_layers": 1}),
        ("glm_moe_dsa", {}),
        ("glm_moe_dsa", {**SIZES, "index_topk_pattern": "FSF", "num_nextn_predict_layers": 1}),
        ("glm_moe_dsa", {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
        ("glm_moe_dsa", {**SIZES, "indexer_types": ["full", "full", "shared"]}),
        ("glm4_moe", {}),
        ("glm4_moe", {**SIZES, "head_dim": 16, "rope_theta": 1e6, "partial_rotary_factor": 0.25}),
        ("glm4_moe", {**SIZES, "rope_parameters": {"rope_theta": 1e6}, "num_mtp_layers": 2}),
        ("glm4_moe_lite", {}),
        ("glm4_moe_lite", {**SIZES, "num_local_experts": 8, "mlp_layer_types": ["dense"] * 3}),
        ("minimax_m2", {}),
        ("minimax_m2", {**SIZES, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 4}),
        ("qwen2", {}),
        ("qwen2", {**SIZES, **WINDOW, "num_key_value_heads": None, "rope_theta": 1e6}),
        ("mistral", {}),
        ("mistral", {**SIZES, "num_key_value_heads": 2, "sliding_window": None}),
        ("mistral", {**SIZES, "head_dim": 16, "rope_scaling": YARN}),
        ("qwen3", {}),
        ("qwen3", {**SIZES, **WINDOW, "rope_parameters": {"rope_theta": 1e6}}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {**SIZES, "head_dim": 16, "num_local_experts": 8, "mlp_only_layers": [1]}),
        ("qwen3_moe", {**SIZES, "use_sliding_window": True, "rope_scaling": YARN}),
        ("deepseek_v2", {}),
        ("deepseek_v2", {**SIZES, **EXPERTS, "q_lora_rank": None, "rope_scaling": YARN}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {**SIZES, **EXPERTS, "num_nextn_predict_layers": 2}),
        ("deepseek_v3", {**SIZES, "num_mtp_layers": 0, "quantization_config": {"a": 1}}),
    ],
)
def test_fields_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    raw = {"model_type": model_type, "architectures": ["A"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    before = json.dumps(raw)

    ours, theirs = built_in_config(raw), AutoConfig.from_pretrained(tmp_path)

    assert json.dumps(raw) == before
    # Theirs have defaults for training besides.
    assert set(raw) - _RENAMED <= set(ours.to_dict())
    for name in ours.to_dict():
        if name not in ("_name_or_path", "dtype"):
            assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**SIZES, "num_experts": 8, "moe_renormalize": False, "num_expert_group": 2},
        {
            **SIZES,
            "first_k_dense_replace": 2,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2],
                "num_heads": 8,
                "head_dim": 16,
                "short_conv_kernel_size": 3,
            },
        },
    ],
)
def test_fields_of_kimi_linear(fields: dict[str, Any], tmp_path: Path) -> None:
    """Some have DeepSeek-V3's names here."""
    raw = {"model_type": "kimi_linear", "architectures": ["A"], **fields}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    ours, theirs = built_in_config(raw), AutoConfig.from_pretrained(tmp_path)

    assert ours.n_routed_experts == theirs.num_local_experts
    for name in ours.to_dict().keys() - {"n_routed_experts", "first_k_dense_replace", "dtype"}:
        if name != "linear_attn_config":
            assert getattr(ours, name) == getattr(theirs, name), name


def test_a_field_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json of type llama: .*hidden_act"):
        resolve_model(ModelOptions(str(tmp_path), load_format="dummy"))


@pytest.mark.parametrize("model_type", ["kimi_k25", "mixtral", None, ["llama"]])
def test_other_types_are_left_to_transformers(model_type: object) -> None:
    assert not is_built_in(model_type)
