"""Plausibility checks of a model configuration's numbers.

They run before transformers or anything else allocates lists, tables or tensors of these sizes. The
upper limits are far above published models and small enough that no weight's size overflows;
whether a model fits the machine is checked by the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom.config import ConfigError

# Field -> maximum; the minimum is 1. Null counts as absent.
_COUNTS = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 18,
    "target_hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "vocab_size": 1 << 24,
    "draft_vocab_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "qk_head_dim": 1 << 15,
    "v_head_dim": 1 << 14,
    "q_lora_rank": 1 << 18,
    "kv_lora_rank": 1 << 18,
    "index_topk": 1 << 20,
    "index_topk_freq": 1 << 10,
    "index_n_heads": 1 << 14,
    "index_head_dim": 1 << 14,
    "n_routed_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "num_aux_hidden_states": 1 << 10,
    "decoder_sparse_step": 1 << 10,
    "linear_num_key_heads": 1 << 14,
    "linear_num_value_heads": 1 << 14,
    "linear_key_head_dim": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "linear_num_heads": 1 << 14,
    "linear_head_dim": 1 << 14,
    "linear_conv_kernel_dim": 1 << 6,
    "routed_expert_hidden_size": 1 << 18,
    "attn_res_block_size": 1 << 10,
    "max_position_embeddings": 1 << 28,
}
# The same, with a minimum of 0.
_COUNTS_OR_NONE = {
    "n_shared_experts": 1 << 10,
    "n_group": 1 << 16,
    "topk_group": 1 << 16,
    "first_k_dense_replace": 1 << 20,
    "num_nextn_predict_layers": 1 << 10,
    "num_labels": 1 << 20,
    "index_skip_topk_offset": 1 << 10,
}
# Must be positive.
_POSITIVE = (
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_theta",
    "partial_rotary_factor",
    "routed_scaling_factor",
    "logits_scaling",
    "query_pre_attn_scalar",
)
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_POSITIVE = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)
_ROPE_NOT_NEGATIVE = ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
# Limit that excludes infinity and absurd numbers.
_LARGEST = 1e18
# In tokens; 0 and -1 mean "off".
_LARGEST_WINDOW = 1 << 31
# An entry for each layer.
_OF_LAYERS = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types")
_ROPE_NOT_NULL = (
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
# Of layers, which may have RoPE parameters of their own.
_ROPE_LAYER_TYPES = ("full_attention", "sliding_attention")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "rope_interleave", "norm_topk_prob")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse implausible sizes, counts and factors, also in nested configurations.

    Args:
        config: the content of `config.json`, or a part of it; unknown fields are ignored.
        where: its name in errors.

    Raises:
        ConfigError: with the field, its value and what is expected.
    """
    _check_counts(config, where)
    for name in _POSITIVE:
        _check_number(config, name, where, zero=False)
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or abs(window) > _LARGEST_WINDOW):
        raise ConfigError(f"{where}: sliding_window should be an integer, got {_show(window)}")
    for name in _FLAGS:
        if config.get(name) is not None and type(config[name]) is not bool:
            raise ConfigError(f"{where}: {name} should be true or false, got {_show(config[name])}")
    for name in _ROPE:
        _check_rope(config, name, where)
    _check_splits(config, where)
    for name, inner in config.items():
        if name.endswith("_config") and isinstance(inner, dict):
            check_config(inner, f"{where}: {name}")


def check_layers(config: Mapping[str, Any], where: str) -> None:
    """Refuse lists with too few entries for the layers.

    Args:
        config: of a language model, completed by its defaults.

    Raises:
        ConfigError: with the field.
    """
    layers = int(config.get("num_hidden_layers") or 0)
    for name in _OF_LAYERS:
        entries = config.get(name)
        if entries is not None and (
            not isinstance(entries, (list, tuple)) or len(entries) < layers
        ):
            raise ConfigError(
                f"{where}: {name} should have an entry for each of num_hidden_layers={layers}, "
                f"got {_show(entries)}"
            )


def _check_counts(config: Mapping[str, Any], where: str) -> None:
    for counts, least in ((_COUNTS, 1), (_COUNTS_OR_NONE, 0)):
        for name, most in counts.items():
            value = config.get(name)
            if value is None:
                continue
            if type(value) is not int or value < least:
                kind = "a positive integer" if least else "an integer of 0 or more"
                told = f"{where}: {name} should be {kind}, got {_show(value)}"
                if isinstance(value, list) and isinstance(config.get("model_type"), str):
                    told += f": layers of several sizes ({config['model_type']}) are not supported"
                raise ConfigError(told)
            if value > most:
                raise ConfigError(f"{where}: {name}={value} is more than the {most} of any model")


def _check_number(config: Mapping[str, Any], name: str, where: str, zero: bool) -> None:
    value = config.get(name)
    if value is None:
        return
    is_number = type(value) in (int, float) and abs(value) < _LARGEST
    if not is_number or value < 0 or (value == 0 and not zero):
        kind = "number of 0 or more" if zero else "positive number"
        raise ConfigError(f"{where}: {name} should be a {kind}, got {_show(value)}")


def _check_rope(config: Mapping[str, Any], field: str, where: str) -> None:
    """The RoPE parameters, and the context length after scaling."""
    rope = config.get(field)
    if rope is None:
        return
    where = f"{where}: {field}"
    if not isinstance(rope, dict):
        raise ConfigError(f"{where} should be an object, got {_show(rope)}")
    for kind in _ROPE_LAYER_TYPES:
        _check_rope(rope, kind, where)
    if nulls := [name for name in _ROPE_NOT_NULL if name in rope and rope[name] is None]:
        raise ConfigError(f"{where}: {', '.join(nulls)} should not be null")
    for name in _ROPE_POSITIVE:
        _check_number(rope, name, where, zero=False)
    for name in _ROPE_NOT_NEGATIVE:
        _check_number(rope, name, where, zero=True)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("linear", "dynamic", "yarn", "llama3") and rope.get("factor") is None:
        raise ConfigError(f"{where}: rope type {kind} needs factor")
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"{where}: low_freq_factor={low} should be smaller than high_freq_factor={high}"
        )
    positions, most = config.get("max_position_embeddings"), _COUNTS["max_position_embeddings"]
    if kind in ("linear", "dynamic") and positions and positions * rope["factor"] > most:
        raise ConfigError(
            f"{where}: factor={rope['factor']} stretches {positions} positions beyond {most}"
        )


def _check_splits(config: Mapping[str, Any], where: str) -> None:
    """Divisibility: of heads by KV heads, of the hidden size by heads, of rotary sizes by 2."""
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    hidden, head_dim = config.get("hidden_size"), config.get("head_dim")
    if heads and hidden and head_dim is None and config.get("kv_lora_rank") is None:
        if hidden % heads:
            raise ConfigError(
                f"{where}: hidden_size={hidden} does not split over num_attention_heads={heads} "
                f"and there is no head_dim"
            )
        head_dim = hidden // heads
    for name, size in (
        ("head_dim", head_dim),
        ("qk_rope_head_dim", config.get("qk_rope_head_dim")),
    ):
        if size is not None and size % 2:
            raise ConfigError(f"{where}: {name}={size} should be even: rotation works on pairs")


def _show(value: object) -> str:
    """`repr`, shortened for error messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
