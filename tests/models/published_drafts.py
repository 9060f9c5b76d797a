"""Configs of Eagle3 drafts as their publishers write them."""

from __future__ import annotations

from typing import Any

LAYER = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"}
LAYER |= {
    "initializer_range": 0.02,
    "num_hidden_layers": 1,
    "use_cache": True,
    "model_type": "llama",
}
MODELOPT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}
# What old versions of transformers wrote into every config.
GENERATION = {"temperature": 1.0, "top_k": 50, "num_beams": 1, "tie_encoder_decoder": False}


def sizes(hidden: int, wide: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "vocab_size"), (hidden, wide, heads, kv_heads, vocab), strict=True))


# Configs as publishers write them; layers of the target, the boundaries that are read, and
# whether the norm comes before the residual.
PUBLISHED: dict[str, tuple[dict[str, Any], int, tuple[int, ...] | None, bool]] = {
    "AngelSlim/Qwen3-8B_eagle3": (
        {
            **LAYER,
            **sizes(4096, 12288, 32, 8, 151936),
            "architectures": ["Eagle3LlamaForCausalLM"],
            "draft_vocab_size": 32000,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        36,
        None,
        False,
    ),
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": (
        {
            "architectures": ["Eagle3Speculator"],
            "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "draft_vocab_size": 32000,
            "has_no_defaults_at_init": False,
            "norm_before_residual": True,
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": []},
            "speculators_model_type": "eagle3",
            "speculators_version": "0.1.0",
            "target_hidden_size": None,
            "transformer_layer_config": {**LAYER, **sizes(2048, 6144, 32, 4, 151936)},
        },
        48,
        None,
        True,
    ),
    "nvidia/Qwen3-235B-A22B-Eagle3": (
        {
            **LAYER,
            **sizes(4096, 24576, 64, 4, 151936),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 151936,
            "eagle_config": {
                **MODELOPT,
                "eagle_aux_hidden_state_layer_ids": [1, 46, 90],
                "use_aux_hidden_state": True,
            },
        },
        94,
        (2, 47, 91),
        False,
    ),
    # SpecForge's template for this target, which its drafts are trained with.
    "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex": (
        {
            **LAYER,
            **sizes(2048, 12288, 32, 4, 151936),
            "architectures": ["LlamaForCausalLMEagle3"],
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "draft_vocab_size": 32000,
            "max_position_embeddings": 2048,
            "max_window_layers": 48,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        48,
        None,
        False,
    ),
    # The norm before `fc` is said in the nested object, and the last id is the last boundary.
    "nvidia/gpt-oss-120b-Eagle3-v3": (
        {
            **LAYER,
            **sizes(2880, 17280, 64, 8, 201088),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 201088,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rope_theta": 150000,
            "eagle_config": {
                **MODELOPT,
                "eagle_aux_hidden_state_layer_ids": [24, 30, 36],
                "norm_before_fc": True,
                "use_aux_hidden_state": True,
            },
        },
        36,
        (24, 30, 36),
        False,
    ),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": (
        {
            "architectures": ["Eagle3DraftModel"],
            "auto_map": {"": "config.Eagle3SpeculatorConfig"},
            "draft_vocab_size": 64000,
            "eagle_aux_hidden_state_layer_ids": None,
            "embed_requires_grad": False,
            "has_no_defaults_at_init": False,
            "norm_before_fc": True,
            "norm_before_residual": True,
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": []},
            "speculators_model_type": "eagle3",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": {
                **LAYER,
                **sizes(2880, 2880, 64, 8, 201088),
                "head_dim": 64,
                "rope_theta": 10000.0,
            },
        },
        24,
        None,
        True,
    ),
    "thoughtworks/MiniMax-M2.5-Eagle3": (
        {
            **LAYER,
            **sizes(3072, 12288, 48, 8, 200064),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 32000,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 30, 58]},
        },
        62,
        (2, 31, 59),
        False,
    ),
    "lightseekorg/kimi-k2.5-eagle3": (
        {
            **LAYER,
            **sizes(7168, 12288, 64, 64, 163840),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 163840,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
        },
        61,
        (2, 30, 58),
        False,
    ),
    "lightseekorg/kimi-k2.5-eagle3-mla": (
        {
            **GENERATION,
            **sizes(7168, 18432, 64, 64, 163840),
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "scoring_func": "sigmoid",
            "n_routed_experts": 384,
            "eagle_config": {**MODELOPT, "eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
        },
        61,
        (2, 30, 58),
        False,
    ),
    "witcheer/gemma-3-27b-eagle3-drafter": (
        {
            **LAYER,
            **sizes(5376, 21504, 32, 16, 262208),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 262208,
            "sliding_window": 512,
            "use_sliding_window": False,
            "target_model_type": "gemma3_text",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 61]},
            "additional_fc": False,
            "reuse_target_lm_head": True,
        },
        62,
        None,
        False,
    ),
}
