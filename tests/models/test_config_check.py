"""What no configuration may say, and that what is published passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.config import ConfigError
from atom.models.config import file as config_file
from atom.models.config.check import check_config
from atom.models.config.file import read_json_object
from atom.models.eagle3.config import Eagle3Config

LLAMA_3_1 = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "mlp_bias": False,
}
DEEPSEEK_V3 = {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0, "type": "yarn"},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    "config",
    [
        LLAMA_3_1,
        DEEPSEEK_V3,
        {"text_config": DEEPSEEK_V3, "vision_config": {"hidden_size": 1152}},
        {"sliding_window": -1, "rope_scaling": None, "head_dim": None, "n_group": 0},
        {"sliding_window": 1 << 31, "vision_config": None, "labels": {"vocab_size": -1}},
        {},
    ],
)
def test_published_values_pass(config: dict[str, Any]) -> None:
    check_config(config, "config.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size should be a positive integer, got 0"),
        ({"hidden_size": 16384.0}, r"hidden_size should be a positive integer, got 16384\.0"),
        ({"hidden_size": True}, "hidden_size should be a positive integer, got True"),
        ({"vocab_size": "x" * 999}, r"vocab_size should be a positive integer, got '.{76}\.\.\."),
        ({"num_hidden_layers": 1025}, "num_hidden_layers=1025 is more than the 1024 of any"),
        ({"n_shared_experts": -1}, "n_shared_experts should be an integer of 0 or more"),
        ({"hidden_size": 16383}, "hidden_size=16383 does not split over num_attention_heads=128"),
        ({"hidden_size": 128 * 3}, "head_dim=3 should be even"),
        ({"head_dim": 127}, "head_dim=127 should be even"),
        ({"num_key_value_heads": 3}, "=128 is no multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps should be a positive number, got 0"),
        ({"rope_theta": -1.0}, r"rope_theta should be a positive number, got -1\.0"),
        ({"rope_theta": float("inf")}, "rope_theta should be a positive number, got inf"),
        ({"rope_theta": 10**400}, "rope_theta should be a positive number, got 10000"),
        ({"rope_scaling": [1]}, r"rope_scaling should be an object, got \[1\]"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type yarn needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling: factor should be a pos"),
        (
            {"rope_parameters": {"low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor=4 should be smaller than high_freq_factor=4",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, "beyond 268435456"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings should be true or false, got 'no'"),
        ({"sliding_window": (1 << 31) + 1}, "sliding_window should be an integer"),
        ({"sliding_window": 10**30}, "sliding_window should be an integer"),
        ({"text_config": {"vocab_size": -1}}, "config.json: text_config: vocab_size should be"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(LLAMA_3_1 | fields, "config.json")


def test_large_json_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate((128 << 20) + 1)  # a hole: takes no room
    with pytest.raises(ConfigError, match=r"config\.json has 134217729 bytes; at most 134217728"):
        read_json_object(path)
    monkeypatch.setattr(config_file, "_MOST_LEVELS", 3)
    path.write_text(json.dumps({"a": [{"b": 1}]}))
    assert read_json_object(path) == {"a": [{"b": 1}]}
    path.write_text(json.dumps({"a": [{"b": []}]}))
    with pytest.raises(ConfigError, match="deeper than 3 levels"):
        read_json_object(path)


DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
LATENT_DRAFT = DRAFT | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


@pytest.mark.parametrize("draft", [DRAFT, LATENT_DRAFT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 0),
        ("head_dim", 10**9),
        ("hidden_size", 10**9),
        ("intermediate_size", 10**9),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**9),
        ("rms_norm_eps", float("nan")),
    ],
)
def test_drafts_are_checked_alike(draft: dict[str, Any], field: str, value: float) -> None:
    Eagle3Config.from_dict(draft)
    with pytest.raises(ConfigError, match=f"draft config: {field}"):
        Eagle3Config.from_dict(draft | {field: value})
    with pytest.raises(ConfigError, match=f"draft config: eagle_config: {field}"):
        Eagle3Config.from_dict(draft | {"eagle_config": {field: value}})
