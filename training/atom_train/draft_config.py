"""Creates the public `config.json` of a draft for a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom.models.block_draft.config import BlockDraftConfig
from atom.models.eagle3.config import Eagle3Config
from atom_train.data.prompts import DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# MLA ranks if the target has none: divisors of the hidden size.
_LATENT_DEFAULTS = {"q_lora_rank": 2, "kv_lora_rank": 4}


def make_draft_config(
    target: PretrainedConfig,
    attention: str,
    draft_vocab_size: int,
    aux_layer_ids: tuple[int, ...],
) -> dict[str, Any]:
    """The config of a draft with the target's hidden size and `mha` or `mla` attention.

    Raises:
        DataError: for another kind of attention.
    """
    size, heads = target.hidden_size, target.num_attention_heads
    raw: dict[str, Any] = {
        "hidden_size": size,
        "num_attention_heads": heads,
        "intermediate_size": target.intermediate_size,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_parameters["rope_theta"],
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": target.max_position_embeddings,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
            "use_aux_hidden_state": True,
        },
    }
    if attention == "mha":
        raw |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_key_value_heads": heads,
            "head_dim": size // heads,
        }
    elif attention == "mla":
        raw |= {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "num_key_value_heads": heads,
            **_latent_fields(target),
        }
    else:
        raise DataError(f"a draft's attention is mha or mla, got {attention!r}")
    Eagle3Config.from_dict(raw)
    return raw


def make_block_config(
    target: PretrainedConfig,
    num_layers: int,
    block_size: int,
    markov_rank: int,
    draft_vocab_size: int,
    mask_token_id: int,
    aux_layer_ids: tuple[int, ...],
) -> dict[str, Any]:
    """The config of a DSpark draft with the target's hidden size and heads, in the layout of the
    speculators library.
    """
    size, heads = target.hidden_size, target.num_attention_heads
    raw: dict[str, Any] = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "block_size": block_size,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": size,
        "mask_token_id": mask_token_id,
        "aux_hidden_state_layer_ids": list(aux_layer_ids),
        "sample_from_anchor": True,
        "markov_rank": markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": size // heads,
            "intermediate_size": target.intermediate_size,
            "rms_norm_eps": target.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rope_theta": target.rope_parameters["rope_theta"],
            "attention_bias": True,
            "hidden_act": "silu",
        },
    }
    BlockDraftConfig.from_dict(raw)
    return raw


def _latent_fields(target: PretrainedConfig) -> dict[str, int]:
    known = target.to_dict()
    fields = {n: known.get(n) or target.hidden_size // d for n, d in _LATENT_DEFAULTS.items()}
    head = target.hidden_size // target.num_attention_heads
    half = max(2, head // 4 * 2)
    return {
        **fields,
        "qk_nope_head_dim": known.get("qk_nope_head_dim") or head,
        "qk_rope_head_dim": known.get("qk_rope_head_dim") or half,
        "v_head_dim": known.get("v_head_dim") or head,
    }
