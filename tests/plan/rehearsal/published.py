"""`config.json` of published checkpoints of Kimi-K2.5 and of its drafts, written by hand.

From what is public of them: sizes, and which layers are stored how. What a start does not read is
left out; weights are not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROPE = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LATENTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_TEXT: Mapping[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    **_LATENTS,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": _ROPE,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "vocab_size": 163840,
}
_KIMI: Mapping[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16},
}

_FP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": 32,
    "scale_format": "e8m0",
    "symmetric": None,
}
_INT4 = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}
_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True}


def _quark(weight: object, inputs: object, exclude: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": inputs,
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": exclude,
        "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
    }


_NOT_EXPERTS = ["re:.*self_attn.*", "re:.*mlp.gate$", "re:.*lm_head", "re:vision_tower.*"]
_NOT_EXPERTS += ["re:.*mm_projector.*"]
# Experts, shared experts and the dense layer in MXFP4, weights and activations.
_MXFP4 = _quark({**_FP4, "is_dynamic": False}, {**_FP4, "is_dynamic": True}, _NOT_EXPERTS)
# Routed experts in groups of 32, as the model's makers publish it.
_PUBLISHED_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
}
# Every linear layer in blocks of 128 x 128, as of DeepSeek-V3.
_FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

_DRAFT: Mapping[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "max_position_embeddings": 262144,
    "hidden_act": "silu",
    "rope_scaling": _ROPE,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
    "torch_dtype": "bfloat16",
}
_MHA: Mapping[str, Any] = {
    **_DRAFT,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_key_value_heads": 64,
    "head_dim": 128,
    "intermediate_size": 12288,
    "rms_norm_eps": 1e-6,
}

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "mxfp4": {**_KIMI, "text_config": _TEXT, "quantization_config": _MXFP4},
    "int4": {**_KIMI, "text_config": {**_TEXT, "quantization_config": _PUBLISHED_INT4}},
    "fp8": {**_KIMI, "text_config": _TEXT, "quantization_config": _FP8_BLOCKS},
}
DRAFTS: Mapping[str, Mapping[str, Any]] = {
    "mha": _MHA,
    # Eagle 3.1: a norm for each hidden state, and the normed output goes on.
    "mla": {
        **_DRAFT,
        **_LATENTS,
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "intermediate_size": 18432,
        "rms_norm_eps": 1e-5,
        "fc_norm": True,
        "norm_output": True,
    },
    "w4a8": {
        **_MHA,
        "quantization_config": _quark(
            [{**_FP8, "is_dynamic": False}, {**_INT4, "is_dynamic": False}],
            {**_FP8, "is_dynamic": True},
            ["embed_tokens", "lm_head", "fc"],
        ),
    },
}


def write(folder: Path, fields: Mapping[str, Any]) -> Path:
    """A checkpoint's folder with its `config.json` and nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder
