"""Tiny random checkpoints of every family that transformers writes, and their variants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from models.checkpoints import DENSE, MLA, Checkpoint, write_checkpoint

# Of configurations: a family's name is its model type; `<name>-<variant>` changes some fields.
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPS = {"n_group": 4, "topk_group": 2}
# So many heads that scores of 0, of which transformers chooses any, are rare.
_INDEXER = {"index_topk": 12, "index_n_heads": 8, "index_head_dim": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 8.0],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40},
    ),
    "qwen2_moe-dense": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 6, "head_dim": 16}),
    "qwen3_moe-renormalised": (
        "Qwen3Moe",
        {
            **_EXPERTS,
            "num_experts": 6,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral-window": ("Mistral", {"head_dim": None, "sliding_window": 9}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-partial": (
        "Phi3",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma2-uncapped": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
            },
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "cohere-norms": ("Cohere", {"use_qk_norm": True}),
    "cohere2": (
        "Cohere2",
        {
            "logit_scale": 0.3,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4_moe": ("Glm4Moe", {**_EXPERTS, "head_dim": 16, "n_routed_experts": 8, **_GROUPS}),
    "glm4_moe-norms": (
        "Glm4Moe",
        {
            **_EXPERTS,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 2,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **MLA,
            **_EXPERTS,
            **_GROUPS,
            "num_nextn_predict_layers": 1,
            **_INDEXER,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **MLA,
            **_EXPERTS,
            "num_nextn_predict_layers": 1,
            "indexer_types": ["full", "shared", "full"],
            **_INDEXER,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**MLA, **_EXPERTS, "v_head_dim": 16}),
}


# Checkpoints with images, and the family of their text model.
TEXT_MODELS = {
    "gemma3": ("Gemma3", "gemma3_text"),
    "mistral3": ("Mistral3", "ministral3"),
    "mistral3-plain": ("Mistral3", "mistral"),
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def write_family(name: str, folder: Path, **fields: Any) -> Checkpoint:
    """A checkpoint that transformers saved, and the model that it saved.

    Args:
        fields: of its configuration, or of its text model's.
    """
    if name in TEXT_MODELS:
        prefix, text = TEXT_MODELS[name]
        config = getattr(transformers, f"{prefix}Config")(
            text_config={**DENSE, **FAMILIES[text][1], **fields, "model_type": text},
            vision_config=_VISION,
            tie_word_embeddings=text != "mistral",
        )
        model_class = getattr(transformers, f"{prefix}ForConditionalGeneration")
        return write_checkpoint(folder, model_class(config))
    prefix, own = FAMILIES[name]
    config_class = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_class)(**{**DENSE, **own, **fields})
    return write_checkpoint(folder, getattr(transformers, f"{prefix}ForCausalLM")(config))
