"""A draft's config.json: defaults, where fields stand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models.published_drafts import LAYER, MODELOPT, PUBLISHED
from spec_decode.draft_bench import DRAFT_VOCAB, HIDDEN, MHA, MLA, VOCAB, YARN
from transformers import PretrainedConfig

from atom.config import ConfigError
from atom.model_loader.drafts.shipped import shipped_draft_for
from atom.models.config.aux_layers import AUX_FIELDS, AuxLayers
from atom.models.eagle3.config import Eagle3Config
from atom.stats import ExpectedAcceptance

MINIMAL = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in names}


def test_defaults() -> None:
    config = Eagle3Config.from_dict(MINIMAL)
    assert config.aux_layers is None
    assert config.num_aux_hidden_states == 3
    assert config.draft_vocab_size == config.vocab_size == 100
    assert config.target_hidden_size == config.hidden_size == 64
    assert config.fc_fan_in == 192
    assert not config.norm_before_residual
    assert not config.fc_norm
    assert not config.norm_output
    assert not config.tied
    assert not config.is_mla
    assert config.network.num_key_value_heads == 4
    assert config.network.head_dim == 16
    assert config.network.rms_norm_eps == 1e-6
    assert config.network.sliding_window is None
    assert not config.network.attention_bias
    assert not config.network.mlp_bias
    assert config.network.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


FIELDS: dict[str, tuple[Any, str, Any]] = {
    **{name: ([1, 5], "aux_layers", AuxLayers(name, (1, 5))) for name in AUX_FIELDS},
    "draft_vocab_size": (32, "draft_vocab_size", 32),
    "target_hidden_size": (48, "target_hidden_size", 48),
    "norm_before_residual": (True, "norm_before_residual", True),
    "fc_norm": (True, "fc_norm", True),
    "norm_output": (True, "norm_output", True),
    "return_hidden_post_norm": (True, "norm_output", True),
    "norm_before_fc": (True, "norm_before_fc", True),
    "draft_temperature_scale": (0.8, "temperature_scale", 0.8),
    "tie_word_embeddings": (True, "tied", True),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_stand_at_the_top_or_in_a_nested_object(name: str) -> None:
    value, attribute, expected = FIELDS[name]
    default = getattr(Eagle3Config.from_dict(MINIMAL), attribute)
    assert default != expected
    for raw in (
        {name: value},
        {"eagle_config": {name: value}},
        {"dflash_config": {name: value}},
        {name: None, "eagle_config": {name: value}},
    ):
        assert getattr(Eagle3Config.from_dict({**MINIMAL, **raw}), attribute) == expected


def test_the_top_level_comes_first() -> None:
    raw = {**MINIMAL, "fc_norm": False, "eagle_config": {"fc_norm": True}}
    assert not Eagle3Config.from_dict(raw).fc_norm


def test_number_of_aux_states_follows_the_ids() -> None:
    two = Eagle3Config.from_dict({**MINIMAL, "eagle_aux_hidden_state_layer_ids": [2, 9]})
    assert (two.num_aux_hidden_states, two.fc_fan_in) == (2, 128)
    same = {**MINIMAL, "eagle_aux_hidden_state_layer_ids": [2, 9], "num_aux_hidden_states": 2}
    assert Eagle3Config.from_dict(same).num_aux_hidden_states == 2


def test_mla_network() -> None:
    config = Eagle3Config.from_dict({**MLA, "rope_scaling": YARN, "rope_theta": 5e4})
    network = config.network
    assert config.is_mla
    assert (network.q_lora_rank, network.kv_lora_rank) == (24, 16)
    assert (network.qk_nope_head_dim, network.qk_rope_head_dim, network.v_head_dim) == (8, 8, 12)
    assert network.rope_interleave
    assert network.rope_parameters["rope_theta"] == 5e4
    assert network.rope_parameters["mscale_all_dim"] == 1.0
    assert Eagle3Config.from_dict(without(MLA, "q_lora_rank")).network.q_lora_rank is None


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"mrope_section": [3, 3, 2], "mrope_interleaved": True},
        {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    ],
)
def test_drafts_of_models_that_see_rotate_by_positions(scaling: dict[str, Any]) -> None:
    config = Eagle3Config.from_dict({**MHA, "rope_scaling": scaling, "rope_theta": 5e4})
    assert config.network.rope_parameters == {"rope_theta": 5e4, "rope_type": "default"}


@pytest.mark.parametrize("raw", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}])
def test_rotation_is_the_drafts_own(raw: dict[str, Any]) -> None:
    config = Eagle3Config.from_dict({**MINIMAL, **raw})
    assert config.network.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        ({"sliding_window": 128}, 128),
        ({"sliding_window": 0}, None),
        ({"sliding_window": -1}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 128, "use_sliding_window": False}, None),
        ({"sliding_window": 128, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 128, "layer_types": ["sliding_attention"]}, 128),
    ],
)
def test_sliding_window_only_when_positive(raw: dict[str, Any], window: int | None) -> None:
    assert Eagle3Config.from_dict({**MINIMAL, **raw}).network.sliding_window == window


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"input_norm": True}, ["input_norm=True"]),
        ({"qk_norm": True, "residual_scale": 0.5}, ["qk_norm=True", "residual_scale=0.5"]),
        ({"logit_scale": 0.25}, ["logit_scale=0.25"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0"]),
        ({"rope_style": "gptj"}, ["rope_style='gptj'"]),
        ({"eagle_config": {"parallel_draft": 4}}, ["parallel_draft=4"]),
        ({"dflash_config": {"use_swa": True}}, ["use_swa=True"]),
    ],
)
def test_unknown_keys_that_change_the_maths_are_refused(
    raw: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError, match="not supported") as raised:
        Eagle3Config.from_dict({**MINIMAL, **raw})
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    "raw",
    [
        {"norm_before_fc": False, "input_norm": None},
        {"eagle_config": {"norm_before_fc": False}},
        {"logit_scale": 1.0, "partial_rotary_factor": 1.0},
        {"torch_dtype": "bfloat16", "transformers_version": "4.57", "use_cache": True},
        {"n_routed_experts": 384, "norm_topk_prob": True, "routed_scaling_factor": 2.827},
        {"num_hidden_layers": 40},
        {"hidden_act": "swish"},
        {"dflash_config": {"mask_token_id": 5, "block_size": 7}},
    ],
)
def test_keys_that_change_nothing_are_accepted(raw: dict[str, Any]) -> None:
    assert Eagle3Config.from_dict({**MINIMAL, **raw}).ignored_keys == ()


def test_other_unknown_keys_are_reported() -> None:
    assert Eagle3Config.from_dict({**MINIMAL, "training_steps": 7}).ignored_keys == (
        "training_steps",
    )


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        ["'LlamaForCausalLM'", "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"],
    ),
    "no architecture": ({"architectures": None}, ["None", "LlamaForCausalLMEagle3"]),
    "latent rank in an MHA draft": ({"kv_lora_rank": 512}, ["kv_lora_rank=512"]),
    "no latent rank in an MLA draft": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        ["kv_lora_rank=None"],
    ),
    "vocabulary larger than the target's": (
        {"draft_vocab_size": 101},
        ["draft_vocab_size=101", "vocab_size=100"],
    ),
    "aux count": (
        {"eagle_aux_hidden_state_layer_ids": [2, 5], "num_aux_hidden_states": 3},
        ["num_aux_hidden_states=3", "[2, 5]", "which are 2"],
    ),
    "aux count without ids": ({"num_aux_hidden_states": 4}, ["=4", "which are 3"]),
    "aux ids of a wrong type": (
        {"eagle_aux_hidden_state_layer_ids": [2, "5"]},
        ["eagle_aux_hidden_state_layer_ids", "[2, '5']"],
    ),
    "aux ids twice": (
        {"target_layer_ids": [1, 4], "eagle_aux_hidden_state_layer_ids": [2, 5]},
        ["eagle_aux_hidden_state_layer_ids=[2, 5] and target_layer_ids=[1, 4]"],
    ),
    "no aux ids": ({"eagle_aux_hidden_state_layer_ids": []}, ["[]"]),
    "last hidden state": (
        {"use_aux_hidden_state": False},
        ["use_aux_hidden_state=False", "between the target's layers"],
    ),
    "last hidden state, nested": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        ["use_aux_hidden_state=False", "between the target's layers"],
    ),
    "activation": ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
    "heads": ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
    "head size": ({"num_attention_heads": 5}, ["hidden_size=64", "num_attention_heads=5"]),
    "no hidden size": ({"hidden_size": None}, ["required field `hidden_size`"]),
    "hidden size of a wrong type": ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
    "flag of a wrong type": ({"fc_norm": 1}, ["fc_norm=1", "`bool`"]),
    "eps": ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
    "window": ({"sliding_window": "all"}, ["sliding_window", "'all'"]),
    "layer type": ({"layer_types": ["linear_attention"]}, ["linear_attention"]),
    "rope type": ({"rope_scaling": {"type": "su", "factor": 2.0}}, ["'su'", "yarn"]),
    "rope key": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_turns": [1]}},
        ["rope_turns=[1]"],
    ),
    "partial rotation": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["partial_rotary_factor=0.5"],
    ),
    "rope factor": ({"rope_scaling": {"type": "yarn"}}, ["yarn needs factor"]),
    "rope of a wrong type": ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
    "eagle_config of a wrong type": ({"eagle_config": [1]}, ["eagle_config", "[1]"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    raw, words = REFUSED[name]
    with pytest.raises(ConfigError, match="draft config") as raised:
        Eagle3Config.from_dict({**MINIMAL, **raw})
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"sliding_window": 64}, ["sliding_window=64"]),
        ({"mlp_bias": True}, ["mlp_bias=true"]),
        ({"v_head_dim": None}, ["v_head_dim", "None"]),
    ],
)
def test_refused_for_mla(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        Eagle3Config.from_dict({**MLA, **raw})
    assert all(word in str(raised.value) for word in words)


def target(**changes: Any) -> PretrainedConfig:
    return PretrainedConfig(**{"hidden_size": HIDDEN, "vocab_size": VOCAB, **changes})


def test_a_draft_fits_its_target() -> None:
    Eagle3Config.from_dict(MHA).check_against_target(target())


def test_hidden_size_of_another_target_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        Eagle3Config.from_dict(MHA).check_against_target(target(hidden_size=48))
    message = str(raised.value)
    assert "target_hidden_size is 32 and the target's hidden_size is 48" in message


def test_vocabulary_of_another_target_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        Eagle3Config.from_dict(MHA).check_against_target(target(vocab_size=VOCAB + 1))
    assert f"vocab_size is {VOCAB} and the target's vocab_size is {VOCAB + 1}" in str(raised.value)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        Eagle3Config.from_folder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        Eagle3Config.from_folder(tmp_path)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="should hold a JSON object, got list"):
        Eagle3Config.from_folder(tmp_path)
    path.write_text(json.dumps(MHA), encoding="utf-8")
    config = Eagle3Config.from_folder(tmp_path)
    assert config.aux_layers is not None
    assert (config.aux_layers.ids, config.draft_vocab_size) == ((2, 4, 5), DRAFT_VOCAB)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    raw, num_layers, boundaries, norm_first = PUBLISHED[name]
    config = Eagle3Config.from_dict(raw)
    assert config.ignored_keys in ((), ("has_no_defaults_at_init",))
    assert config.norm_before_residual == norm_first
    assert config.network.sliding_window is None if not config.is_mla else True
    if boundaries is not None:
        assert config.aux_layers is not None
        assert config.aux_layers.resolve(num_layers)[0] == boundaries


SPECULATOR = PUBLISHED["RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3"][0]


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
def test_the_speculators_layout(architecture: str) -> None:
    raw = {**SPECULATOR, "architectures": [architecture]}
    assert Eagle3Config.from_dict(without(raw, "norm_before_residual")).norm_before_residual
    config = Eagle3Config.from_dict(
        {**raw, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 23, 44]}
    )
    assert config.norm_before_fc
    assert config.aux_layers is not None
    assert config.aux_layers.resolve(48)[0] == (1, 23, 44)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"eagle_config": {**MODELOPT, "use_last_layernorm": False}}, "use_last_layernorm=False"),
        ({"eagle_config": {**MODELOPT, "parallel_draft_step": 3}}, "parallel_draft_step=3"),
        ({"eagle_config": {**MODELOPT, "use_mtp_layernorm": True}}, "use_mtp_layernorm=True"),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "first_layer=False"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn=True"),
        ({"additional_fc": True}, "additional_fc=True"),
        ({"architectures": ["Qwen3MoEForCausalLMEagle3"]}, "Qwen3MoEForCausalLMEagle3"),
        (
            {**SPECULATOR, "transformer_layer_config": {**LAYER, "model_type": "qwen3"}},
            "model_type 'qwen3'",
        ),
        (
            {
                **SPECULATOR,
                "draft_vocab_size": 100,
                "transformer_layer_config": {**LAYER, "num_hidden_layers": 2},
            },
            "num_hidden_layers=2 is not supported",
        ),
    ],
)
def test_published_formats_that_compute_something_else_are_refused(
    raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3Config.from_dict({**MINIMAL, **raw})


CARD = {"tokens_per_forward": 2.5, "num_speculative_tokens": 3, "data": "GSM8K, greedy"}


def test_a_card_may_state_its_acceptance_length() -> None:
    config = Eagle3Config.from_dict({**MINIMAL, "expected_acceptance_length": CARD})
    assert config.expected_acceptance == ExpectedAcceptance(source="eagle3", **CARD)
    assert Eagle3Config.from_dict(MINIMAL).expected_acceptance is None
    shipped = shipped_draft_for(None)
    assert shipped is not None
    assert Eagle3Config.from_folder(shipped).expected_acceptance is not None


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (2.5, "expected_acceptance_length=2.5: Expected `object"),
        ({"tokens_per_forward": 2.5}, "missing required field `num_speculative_tokens`"),
        ({**CARD, "more": 1}, "unknown field `more`"),
        ({**CARD, "num_speculative_tokens": 0}, r"\(num_speculative_tokens\): Expected `int` >= 1"),
        ({**CARD, "tokens_per_forward": 4.1}, "should be 1 to 4 with 3 drafts, got 4.1"),
        ({**CARD, "tokens_per_forward": "2"}, r"\(tokens_per_forward\): Expected `float`"),
        ({**CARD, "data": ""}, r"\(data\): Expected `str` of length >= 1"),
    ],
)
def test_other_cards_are_refused(card: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3Config.from_dict({**MINIMAL, "expected_acceptance_length": card})
