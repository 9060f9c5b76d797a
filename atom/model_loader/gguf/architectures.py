"""llama.cpp's architectures: which model a file holds, and what its keys and tensors are called.

Sources: `gguf.constants.MODEL_TENSORS` and `Keys` for names, llama.cpp's converter for the order of
rows and for what is not in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atom.model_loader.gguf.file import GGUFFile

# Modules that no checkpoint has: keys and values of the up-projection of latents, by head.
UP_KEYS, UP_VALUES = "self_attn.kv_b_proj.keys", "self_attn.kv_b_proj.values"
# `expert_gating_func`
SOFTMAX, SIGMOID = 1, 2
# The factor of queries by position.
TEMPERATURE = "attention.temperature_scale"

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
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
# The bias of the choice of experts is a tensor of its own in both formats.
_BIASED_EXPERTS = {**_EXPERTS, "exp_probs_b": "mlp.gate.e_score_correction_bias"}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LATENT_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # Two parts of one matrix, the first transposed.
    "attn_k_b": UP_KEYS,
    "attn_v_b": UP_VALUES,
    "attn_output": "self_attn.o_proj",
}
_INDEXER = {
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
_PREDICTION = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_DELTA_NET = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_KIMI_DELTA = {
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
# Rows of both, by heads of keys.
_FUSED_GATES = {"ssm_ba": "linear_attn.in_proj_b linear_attn.in_proj_a"}
_GATES = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
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
_SHARED_SIZE = {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)}
_DELTA_SIZES = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
    "linear_key_head_dim": ("ssm.state_size", int),
    "linear_num_key_heads": ("ssm.group_count", int),
    "linear_num_value_heads": ("ssm.time_step_rank", int),
    # Of all heads, until `config_dict` divides them.
    "linear_value_head_dim": ("ssm.inner_size", int),
    # Which layers have attention, their tensors say.
    "full_attention_interval": ("full_attention_interval", int),
}
_ROUTED_EXPERTS = {
    **_EXPERT_COUNTS,
    "n_routed_experts": ("expert_count", int),
    "n_shared_experts": ("expert_shared_count", int),
    "n_group": ("expert_group_count", int),
    "topk_group": ("expert_group_used_count", int),
    "first_k_dense_replace": ("leading_dense_block_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
    "routed_scaling_factor": ("expert_weights_scale", float),
    "norm_topk_prob": ("expert_weights_norm", bool),
}
# Of keys that are absent.
_ROUTED_DEFAULTS = {
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}
_PREDICTION_COUNT = {"num_nextn_predict_layers": ("nextn_predict_layers", int)}
_LATENT_RANKS = {
    "q_lora_rank": ("attention.q_lora_rank", int),
    "kv_lora_rank": ("attention.kv_lora_rank", int),
}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NORMS = {
    "layer_norm_eps": ("attention.layer_norm_epsilon", float),
    "logit_scale": ("logit_scale", float),
}
_WINDOW = {"sliding_window": ("attention.sliding_window", int)}
_MULTIPLIERS = {
    "embedding_multiplier": ("embedding_scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logit_scale", float),
}
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BERT_OUTER = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
# Positions of a text are one number, which rotates all sections alike.
_SECTIONS = "rope.dimension_sections"


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
    gating: what `expert_gating_func` must be, where a file has it.
    is_latent: whether keys and values are projected up from latents.
    rounds_yarn: whether YaRN's range of scaled frequencies ends at whole numbers.
    adds_one: whether norms in the file have the 1 that the checkpoint's are without.
    scales_queries: whether queries are scaled by position.
    is_complete: whether a file without one of the keys of `fields` is refused.
    of_images: keys that change nothing in a text without images.
    tiles_heads: whether heads of values lie by their number within a head of keys, then by that.
    outer: as `layer`, of tensors outside of layers.
    layers: the checkpoint's name of the list of layers.
    is_encoder: whether it embeds and cannot generate.
    """

    model_class: str
    model_type: str
    layer: Mapping[str, str]
    fields: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False
    is_partial: bool = False
    window_theta: float | None = None
    gating: int = SOFTMAX
    is_latent: bool = False
    rounds_yarn: bool = True
    adds_one: bool = False
    scales_queries: bool = False
    is_complete: bool = False
    of_images: frozenset[str] = frozenset()
    tiles_heads: bool = False
    outer: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    layers: str = "model.layers"
    is_encoder: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _LLAMA, pairs=True),
    "mistral3": Architecture(
        "MistralForCausalLM", "mistral", _LLAMA, constants={"sliding_window": None}, pairs=True
    ),
    # Models with Llama's maths, or another's, and a name of their own.
    "internlm2": Architecture("LlamaForCausalLM", "llama", _LLAMA, pairs=True),
    "ernie4_5": Architecture("LlamaForCausalLM", "llama", _LLAMA, pairs=True),
    "exaone": Architecture("LlamaForCausalLM", "llama", _LLAMA),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "seed_oss": Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            **_ATTENTION,
            **_MLP,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _PRE_NORMS | _ATTENTION | _EXPERTS | _SHARED_EXPERT,
        _QWEN_EXPERTS | _SHARED_SIZE,
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
    # Its projections are apart, as those of Qwen3.5, whose maths is the same.
    "qwen3next": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _DELTA_NET | _ATTENTION | _QK_NORMS | _FUSED_GATES | _EXPERTS | _SHARED_EXPERT,
        _QWEN_EXPERTS | _SHARED_SIZE | _DELTA_SIZES,
        is_partial=True,
        adds_one=True,
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        _DELTA_NET | _ATTENTION | _QK_NORMS | _GATES | _MLP | _PREDICTION,
        _DELTA_SIZES | _PREDICTION_COUNT,
        is_partial=True,
        adds_one=True,
        of_images=frozenset({_SECTIONS}),
        tiles_heads=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _DELTA_NET | _ATTENTION | _QK_NORMS | _GATES | _EXPERTS | _SHARED_EXPERT | _PREDICTION,
        _QWEN_EXPERTS | _SHARED_SIZE | _DELTA_SIZES | _PREDICTION_COUNT,
        is_partial=True,
        adds_one=True,
        of_images=frozenset({_SECTIONS}),
        tiles_heads=True,
    ),
    # The text networks of models that see.
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", _LLAMA, of_images=frozenset({_SECTIONS})),
    "qwen3vl": Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        _LLAMA | _QK_NORMS,
        of_images=frozenset({_SECTIONS, "n_deepstack_layers"}),
    ),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _PRE_NORMS | _ATTENTION | _QK_NORMS | _EXPERTS,
        _QWEN_EXPERTS,
        {"norm_topk_prob": True},
        of_images=frozenset({_SECTIONS, "n_deepstack_layers"}),
    ),
    "bert": Architecture(
        "BertModel",
        "bert",
        _BERT,
        {
            "layer_norm_eps": ("attention.layer_norm_epsilon", float),
            "is_causal": ("attention.causal", bool),
        },
        outer=_BERT_OUTER,
        layers="encoder.layer",
        is_encoder=True,
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
        {**_MULTIPLIERS, "attention_multiplier": ("attention.scale", float)},
        pairs=True,
    ),
    # Files of before 2024-12 have none of the multipliers.
    "minicpm": Architecture(
        "GraniteForCausalLM", "granite", _LLAMA, _MULTIPLIERS, pairs=True, is_complete=True
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        _SANDWICH_NORMS | _ATTENTION | _MLP,
        {
            **_WINDOW,
            "attn_logit_softcapping": ("attn_logit_softcapping", float),
            "final_logit_softcapping": ("final_logit_softcapping", float),
        },
        {"hidden_activation": "gelu_pytorch_tanh"},
        adds_one=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _SANDWICH_NORMS | _ATTENTION | _QK_NORMS | _MLP,
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
    "command-r": Architecture(
        "CohereForCausalLM",
        "cohere",
        {**_ATTENTION, **_QK_NORMS, **_MLP, "attn_norm": "input_layernorm"},
        _LAYER_NORMS,
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        "cohere2",
        {**_ATTENTION, **_MLP, "attn_norm": "input_layernorm"},
        {**_LAYER_NORMS, **_WINDOW},
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
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **_ATTENTION,
            **_QK_NORMS,
            **_MLP,
            **_BIASED_EXPERTS,
            **_SHARED_EXPERTS,
            **_PREDICTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
        },
        _ROUTED_EXPERTS | _PREDICTION_COUNT,
        {**_ROUTED_DEFAULTS, "num_nextn_predict_layers": 0},
        is_partial=True,
        gating=SIGMOID,
    ),
    "dots1": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **_PRE_NORMS,
            **_ATTENTION,
            **_QK_NORMS,
            **_MLP,
            **_BIASED_EXPERTS,
            **_SHARED_EXPERTS,
        },
        _ROUTED_EXPERTS,
        {**_ROUTED_DEFAULTS, "num_nextn_predict_layers": 0, "partial_rotary_factor": 1.0},
        gating=SIGMOID,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {
            **_PRE_NORMS,
            **_ATTENTION,
            **_QK_NORMS,
            **_EXPERTS,
            "exp_probs_b": "mlp.e_score_correction_bias",
        },
        {
            **_EXPERT_COUNTS,
            "num_local_experts": ("expert_count", int),
            "intermediate_size": ("expert_feed_forward_length", int),
        },
        is_partial=True,
        gating=SIGMOID,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_ATTENTION,
            **_EXPERTS,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        {
            **_EXPERT_COUNTS,
            **_WINDOW,
            "num_local_experts": ("expert_count", int),
            "intermediate_size": ("expert_feed_forward_length", int),
        },
        rounds_yarn=False,
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _PRE_NORMS | _LATENT_ATTENTION | _MLP | _EXPERTS | _SHARED_EXPERTS,
        {**_ROUTED_EXPERTS, **_LATENT_RANKS},
        {**_ROUTED_DEFAULTS, "q_lora_rank": None},
        is_latent=True,
    ),
    "glm-dsa": Architecture(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {
            **_PRE_NORMS,
            **_LATENT_ATTENTION,
            **_INDEXER,
            **_MLP,
            **_BIASED_EXPERTS,
            **_SHARED_EXPERTS,
            **_PREDICTION,
        },
        {
            **_ROUTED_EXPERTS,
            **_LATENT_RANKS,
            **_PREDICTION_COUNT,
            "index_n_heads": ("attention.indexer.head_count", int),
            "index_head_dim": ("attention.indexer.key_length", int),
            "index_topk": ("attention.indexer.top_k", int),
        },
        {**_ROUTED_DEFAULTS, "num_nextn_predict_layers": 0},
        gating=SIGMOID,
        is_latent=True,
    ),
    "kimi-linear": Architecture(
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            **_PRE_NORMS,
            **_ATTENTION,
            **_LATENT_ATTENTION,
            **_KIMI_DELTA,
            **_MLP,
            **_BIASED_EXPERTS,
            **_SHARED_EXPERTS,
        },
        {
            **_ROUTED_EXPERTS,
            **_LATENT_RANKS,
            "linear_head_dim": ("kda.head_dim", int),
            "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
        },
        {**_ROUTED_DEFAULTS, "norm_topk_prob": True, "q_lora_rank": None},
        gating=SIGMOID,
        is_latent=True,
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

# Ministral 3's are Mistral's with a factor for queries.
_WITH_TEMPERATURE: Mapping[str, Architecture] = {
    "mistral3": Architecture(
        "Ministral3ForCausalLM", "ministral3", _LLAMA, pairs=True, scales_queries=True
    ),
}
# DeepSeek-V3's are V2's with a bias of the choice of experts; so are Kimi-K2's and GLM-4.7-Flash's.
_WITH_BIAS: Mapping[str, Architecture] = {
    "deepseek2": replace(
        ARCHITECTURES["deepseek2"],
        model_class="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        layer={**ARCHITECTURES["deepseek2"].layer, **_BIASED_EXPERTS},
        constants={**_ROUTED_DEFAULTS, "q_lora_rank": None, "num_nextn_predict_layers": 0},
        gating=SIGMOID,
    ),
}


def architecture_of(file: GGUFFile) -> Architecture:
    """The file's entry; its name must be among `ARCHITECTURES`."""
    name = file.architecture
    if name in _WITH_BIAS and any(".exp_probs_b." in tensor for tensor in file.tensors):
        return _WITH_BIAS[name]
    if name in _WITH_EXPERTS and file.metadata.get(f"{name}.expert_count", int, 0):
        return _WITH_EXPERTS[name]
    if name in _WITH_TEMPERATURE and f"{name}.{TEMPERATURE}" in file.metadata:
        return _WITH_TEMPERATURE[name]
    return ARCHITECTURES[name]


def _names_by_type() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for table in (ARCHITECTURES, _WITH_EXPERTS, _WITH_TEMPERATURE, _WITH_BIAS):
        for name, architecture in table.items():
            found[architecture.model_type] = (*found.get(architecture.model_type, ()), name)
    # What is computed as another type.
    found["glm4_moe_lite"] = found["deepseek_v3"]
    found["qwen3_next"], found["qwen3_5_moe_text"] = ("qwen3next",), ("qwen35moe",)
    return found


# What llama.cpp calls the models of a configuration's type.
GGUF_NAMES: Mapping[str, tuple[str, ...]] = _names_by_type()
