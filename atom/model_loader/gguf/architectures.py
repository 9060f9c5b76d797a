"""llama.cpp's architectures: which model a file holds, and what its keys and tensors are called.

Sources: `gguf.constants.MODEL_TENSORS` and `Keys` for names, llama.cpp's converter for the order of
rows and for what is not in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atom.model_loader.gguf.file import GGUFFile

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Rows of several matrices, one above the other.
_FUSED_QKV = {"attn_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj"}
_FUSED_MLP = {"ffn_up": "mlp.gate_proj mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _PRE_NORMS | _ATTENTION | _MLP

_EXPERT_COUNTS = {"num_experts_per_tok": ("expert_used_count", int)}
_QWEN_EXPERTS = {
    **_EXPERT_COUNTS,
    "num_experts": ("expert_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
}
_WINDOW = {"sliding_window": ("attention.sliding_window", int)}


@dataclass(frozen=True)
class Architecture:
    """Attributes:
    model_class, model_type: of the Hugging Face configuration.
    layer: GGUF's name of a layer's tensor -> the checkpoint's module; `*` is an expert's number,
        and names with a space between them are matrices whose rows follow each other.
    fields: of the configuration, from a key (without the architecture) and its type. Optional.
    constants: fields that no key has.
    pairs: whether rows of queries and keys are stored for a rotation of neighbouring elements.
    is_partial: whether fewer elements of a head may be rotated than it has.
    window_theta: the base of the rotation of layers with windows, if they have one of their own and
        no key has it.
    adds_one: whether norms in the file have the 1 that the checkpoint's are without.
    """

    model_class: str
    model_type: str
    layer: Mapping[str, str]
    fields: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False
    is_partial: bool = False
    window_theta: float | None = None
    adds_one: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _LLAMA, pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _PRE_NORMS | _ATTENTION | _EXPERTS | _SHARED_EXPERT,
        {
            **_QWEN_EXPERTS,
            "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int),
        },
        {"norm_topk_prob": False},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _LLAMA | _QK_NORMS),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _PRE_NORMS | _ATTENTION | _QK_NORMS | _EXPERTS,
        _QWEN_EXPERTS,
        {"norm_topk_prob": True},
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _LLAMA, pairs=True),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        {
            **_ATTENTION,
            **_QK_NORMS,
            **_MLP,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        _LLAMA,
        {
            "attention_multiplier": ("attention.scale", float),
            "embedding_multiplier": ("embedding_scale", float),
            "residual_multiplier": ("residual_scale", float),
            "logits_scaling": ("logit_scale", float),
        },
        pairs=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            **_ATTENTION,
            **_QK_NORMS,
            **_MLP,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _WINDOW,
        {"hidden_activation": "gelu_pytorch_tanh"},
        window_theta=10_000.0,
        adds_one=True,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        _PRE_NORMS | _ATTENTION | _FUSED_QKV | _FUSED_MLP,
        _WINDOW,
        is_partial=True,
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        {
            **_PRE_NORMS,
            **_ATTENTION,
            **_FUSED_MLP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        is_partial=True,
    ),
}
# Mixtral's files are Llama's with experts.
_WITH_EXPERTS: Mapping[str, Architecture] = {
    "llama": Architecture(
        "MixtralForCausalLM",
        "mixtral",
        _PRE_NORMS | _ATTENTION | _EXPERTS,
        {**_EXPERT_COUNTS, "num_local_experts": ("expert_count", int)},
        {"sliding_window": None},
        pairs=True,
    ),
}


def architecture_of(file: GGUFFile) -> Architecture:
    """The file's entry; its name must be among `ARCHITECTURES`."""
    name = file.architecture
    if name in _WITH_EXPERTS and file.metadata.get(f"{name}.expert_count", int, 0):
        return _WITH_EXPERTS[name]
    return ARCHITECTURES[name]


def _names_by_type() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for table in (ARCHITECTURES, _WITH_EXPERTS):
        for name, architecture in table.items():
            found[architecture.model_type] = (*found.get(architecture.model_type, ()), name)
    return found


# What llama.cpp calls the models of a configuration's type.
GGUF_NAMES: Mapping[str, tuple[str, ...]] = _names_by_type()
