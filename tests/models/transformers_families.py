"""Tiny configurations of families that run by transformers' modelling code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from models.checkpoints import DENSE, Checkpoint
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Experts by all the names that families have for the same.
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_WINDOWS = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Model type -> its own fields. None of them has a class of atom's.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": _WINDOWS,
    "apertus": {},
    "apertus1p5_text": {},
    "arcee": {},
    "aria_text": {},
    "axk1": MLA,
    "beam": {},
    "bitnet": {},
    "codegen": {"rotary_dim": 8},
    "cohere2_moe": _WINDOWS,
    "ctrl": {},
    "cwm": _WINDOWS,
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": _WINDOWS,
    "exaone_moe": _WINDOWS,
    "flex_olmo": {},
    "gemma": {"head_dim": 12},
    "gemma4_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 512,
    },
    "glm": {"head_dim": 16},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "granitemoe": {},
    "granitemoeshared": {"shared_intermediate_size": 40},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 12},
    "hunyuan_v1_moe": {"head_dim": 12, "moe_topk": 2},
    "hy_v3": {},
    "hyperclovax": {},
    "internlm3": {},
    "jais2": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "minicpm3": MLA,
    "minimax_m3_vl_text": {},
    "modernbert-decoder": {},
    "moshi": {},
    "nanochat": {},
    "olmo": {"clip_qkv": 0.5},
    "olmo3": _WINDOWS,
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phimoe": {},
    "sarvam_mla": MLA,
    "seed_oss": {},
    "solar_open": {},
    "starcoder2": {"sliding_window": 9},
    "youtu": MLA,
}


# Those that each commit tests; the others run every night.
OFTEN = (
    *("afmoe", "arcee", "axk1", "bitnet", "codegen"),
    "cohere2_moe",
    *("ctrl", "cwm", "ernie4_5_moe", "exaone4", "gemma", "glm", "gpt2", "gpt_bigcode", "gpt_neox"),
    *("granitemoe", "helium", "hunyuan_v1_dense", "nanochat", "olmo3", "opt", "phi"),
    *("persimmon", "starcoder2"),
)


def write_family(model_type: str, folder: Path, **fields: Any) -> Checkpoint:
    """A checkpoint that transformers saved, and the model that it saved."""
    own = {**DENSE, **EXPERTS, **FAMILIES[model_type], **fields}
    config = CONFIG_MAPPING[model_type](**own)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return save_random(model_class(config), folder)


@torch.no_grad()
def save_random(model: PreTrainedModel, folder: Path) -> Checkpoint:
    """A model with random numbers in all that a checkpoint has."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or "embed_scale" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)
        else:
            tensor.add_(0.1 * noise)
    model.to(torch.float32).eval().save_pretrained(folder)
    return Checkpoint(folder, model)
