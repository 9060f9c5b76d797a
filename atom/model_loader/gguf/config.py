"""A GGUF file's metadata as Hugging Face `config.json` and `generation_config.json`.

Source of the keys: `gguf.constants.Keys`. Unknown keys of the architecture are refused, since they
may change what the model computes.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from atom.config import ConfigError
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.gguf.architectures import (
    ARCHITECTURES,
    TEMPERATURE,
    Architecture,
    architecture_of,
)
from atom.model_loader.gguf.bert import bert_config
from atom.model_loader.gguf.file import GGUFFile
from atom.model_loader.gguf.pooling import NONE, check_pooling
from atom.models.config.check import check_config

_BLOCK = re.compile(r"blk\.(\d+)\.")
# Layers of the models of 27 billion parameters.
_GEMMAS_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
_DEFAULT_ROPE_THETA = 10000.0

POOLING = "pooling_type"
# In files of Granite: whether there are rotations at all.
_FINETUNED = "rope.scaling.finetuned"
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    _FINETUNED,
    "rope.scaling.attn_factor",
    "rope.freq_base_swa",
    "vocab_size",
    "tensor_data_layout",
    # For those who embed.
    POOLING,
}
_YARN_KEYS = {
    "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
# Those of latent attention and its scaling.
_LATENT_KEYS = {"attention.key_length_mla", "attention.value_length_mla", *_YARN_KEYS}
_GATING = "expert_gating_func"
# Keys that are accepted only with the value 0.
_ZERO_KEYS = {"expert_count", "expert_used_count", "attention.sliding_window"}
# Architectures that generate nothing.
_ENCODERS = (
    *("nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"),
    *("modern-bert", "eurobert", "gemma-embedding", "t5encoder"),
)

# What llama.cpp writes beside models that see or hear.
_TOWER = "clip"

# Constants of Llama 3.1 and later; the file has only the factor.
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def check_architecture(file: GGUFFile) -> None:
    """Refuse unsupported files.

    Raises:
        ConfigError: for the architecture, or unknown keys.
    """
    architecture = file.architecture
    if architecture in _ENCODERS:
        raise ConfigError(
            f"{file.path}: GGUF files of this encoder ({architecture}) are not read; such models, "
            f"which embed or score texts, are read from safetensors with a modules.json"
        )
    check_pooling(file.path, file.metadata.get(f"{architecture}.{POOLING}", int, NONE))
    if architecture == _TOWER:
        raise ConfigError(
            f"{file.path} holds the tower of a model that sees; give the file of its text model"
        )
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    prefix, entry = f"{architecture}.", architecture_of(file)
    known = _KNOWN_KEYS | entry.of_images | {key for key, _ in entry.fields.values()}
    if entry.is_latent:
        known |= _LATENT_KEYS
    if entry.scales_queries:
        known |= {TEMPERATURE, *_YARN_KEYS}
    if file.metadata.get(prefix + _GATING, int, entry.gating) == entry.gating:
        known.add(_GATING)
    if entry.model_type == "granite" and not file.metadata.get(prefix + _FINETUNED, bool, True):
        known.discard(_FINETUNED)
    keys = [k.removeprefix(prefix) for k in file.metadata if k.startswith(prefix)]
    unknown = [k for k in keys if k not in known]
    refused = [k for k in unknown if k not in _ZERO_KEYS or file.metadata.get(prefix + k, int, 0)]
    if refused:
        raise ConfigError(
            f"{file.path}: {architecture} with {name_some(refused)} is not supported in GGUF files"
        )


def head_sizes(file: GGUFFile) -> tuple[int, int]:
    """Elements of one attention head, and of those that are rotated.

    Raises:
        ConfigError: when keys and values, or rotary dimensions, differ in size.
    """
    own = f"{file.architecture}."
    metadata = file.metadata
    heads = metadata.require(own + "attention.head_count", int)
    hidden = metadata.require(own + "embedding_length", int)
    even = hidden // max(heads, 1)
    key = metadata.get(own + "attention.key_length", int, even)
    value = metadata.get(own + "attention.value_length", int, even)
    rotated = metadata.get(own + "rope.dimension_count", int, key)
    if architecture_of(file).is_partial and key == value and 0 < rotated <= key:
        return key, rotated
    if not key == value == rotated:
        raise ConfigError(
            f"{file.path}: heads with {key} elements of keys, {value} of values and {rotated} "
            f"rotated are not supported; the three must be equal"
        )
    return key, rotated


def _latent_sizes(file: GGUFFile) -> dict[str, int]:
    """Elements of one head of latent attention. Files of before 2025-04 have no keys of their own
    for them, since their heads were stored as they are computed.
    """
    own = f"{file.architecture}."
    metadata = file.metadata
    rotated = metadata.require(own + "rope.dimension_count", int)
    sizes = {}
    for name in ("key_length", "value_length"):
        key = f"{own}attention.{name}"
        sizes[name] = metadata.get(f"{key}_mla", int) or metadata.require(key, int)
    return {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": sizes["key_length"] - rotated,
        "v_head_dim": sizes["value_length"],
        "num_key_value_heads": metadata.require(own + "attention.head_count", int),
    }


def _delta_net(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers have linear attention, and the size of a head of values.

    Raises:
        WeightError: when sizes are missing, or do not fit.
    """
    own = f"{file.architecture}."
    for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"):
        file.metadata.require(f"{own}ssm.{key}", int)
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    inner = config["linear_value_head_dim"]
    if min(key_heads, heads) < 1 or heads % key_heads or inner % heads:
        raise WeightError(
            f"{file.path}: ssm.group_count={key_heads} should divide ssm.time_step_rank={heads}, "
            f"and that ssm.inner_size={inner}"
        )
    count = config["num_hidden_layers"] - config.get("num_nextn_predict_layers", 0)
    return {
        "linear_value_head_dim": inner // heads,
        "layer_types": _types_by_tensors(file, count),
        "mtp_num_hidden_layers": config.get("num_nextn_predict_layers", 0),
        "attn_output_gate": True,
    }


def _kimi_delta(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers have linear attention, whose heads are as many as the others'.

    Raises:
        WeightError: when sizes are missing.
    """
    for key in ("kda.head_dim", "ssm.conv_kernel"):
        file.metadata.require(f"{file.architecture}.{key}", int)
    return {
        "linear_num_heads": config["num_attention_heads"],
        "layer_types": _types_by_tensors(file, config["num_hidden_layers"]),
    }


def _indexers(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers choose tokens, and which share the choice of one before.

    Raises:
        WeightError: when sizes are missing.
    """
    for key in ("head_count", "key_length", "top_k"):
        file.metadata.require(f"{file.architecture}.attention.indexer.{key}", int)
    count = config["num_hidden_layers"] - config["num_nextn_predict_layers"]
    return {
        "indexer_types": [
            "full" if f"blk.{i}.indexer.attn_k.weight" in file.tensors else "shared"
            for i in range(count)
        ]
    }


def _types_by_tensors(file: GGUFFile, count: int) -> list[str]:
    return [
        "linear_attention" if f"blk.{i}.ssm_a" in file.tensors else "full_attention"
        for i in range(count)
    ]


def config_dict(file: GGUFFile, dtype: torch.dtype) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        ConfigError: when the file needs something unsupported.
        WeightError: when a key is missing, or contradicts the tensors.
    """
    check_architecture(file)
    metadata, own = file.metadata, f"{file.architecture}."
    architecture = architecture_of(file)
    if architecture.is_encoder:
        config = bert_config(file, dtype)
        check_config(config, str(file.path))
        _check_tensors(file, config)
        return config
    has_bias = "blk.0.attn_q.bias" in file.tensors
    heads = metadata.require(own + "attention.head_count", int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightError(f"{file.path} lacks the tensor token_embd.weight")
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "attention_bias": has_bias,
        "qkv_bias": has_bias,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "hidden_act": "silu",
        "hidden_size": metadata.require(own + "embedding_length", int),
        "intermediate_size": metadata.require(own + "feed_forward_length", int),
        "max_position_embeddings": metadata.require(own + "context_length", int),
        "num_attention_heads": heads,
        "num_hidden_layers": metadata.require(own + "block_count", int),
        "num_key_value_heads": heads
        if architecture.is_latent  # one key, or none in layers with linear attention
        else metadata.get(own + "attention.head_count_kv", int, heads),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": embedding.shape[0],
        "dtype": str(dtype).removeprefix("torch."),
        **_token_ids(file, ("bos", "eos", "pad")),
        **architecture.constants,
        **_fields(file, architecture),
    }
    if "layer_norm_eps" not in architecture.fields:
        eps = metadata.require(own + "attention.layer_norm_rms_epsilon", float)
        config["rms_norm_eps"] = eps
    if "linear_value_head_dim" in architecture.fields:
        config |= _delta_net(file, config)
    if "index_topk" in architecture.fields:
        config |= _indexers(file, config)
    if "linear_head_dim" in architecture.fields:
        config |= _kimi_delta(file, config)
    if architecture.is_latent:
        config |= _latent_sizes(file)
    else:
        config["head_dim"] = head_sizes(file)[0]
    if config["model_type"] == "deepseek_v2" and config["n_group"] > 1:
        config["topk_method"] = "group_limited_greedy"
    # They are counted as blocks.
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    if architecture.model_type == "granite":
        config.setdefault("attention_multiplier", config["head_dim"] ** -0.5)
    if architecture.model_type in _GEMMAS_BY_WIDTH:
        config["query_pre_attn_scalar"] = _gemma_scalar(config)
    if "blk.0.ffn_gate.bias" in file.tensors:
        config["mlp_bias"] = True
    check_config(config, str(file.path))
    _check_tensors(file, config)
    config["rope_parameters"] = _rope_parameters(file, config)
    check_config(config, str(file.path))
    return config


def _fields(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """What the architecture has besides. A window of 0 is none.

    Raises:
        WeightError: when a key is missing that the architecture always has.
    """
    prefix = f"{file.architecture}."
    if architecture.is_complete:
        for key, kind in architecture.fields.values():
            file.metadata.require(prefix + key, kind)
    found = {
        name: file.metadata.get(prefix + key, kind)
        for name, (key, kind) in architecture.fields.items()
        if prefix + key in file.metadata
    }
    if found.get("sliding_window") == 0:
        found["sliding_window"] = None
    return found


def _gemma_scalar(config: dict[str, Any]) -> int:
    """The square of the divisor of queries: no key has it, and the largest model has its own.
    Source: llama.cpp's `llama-model.cpp`.
    """
    if config["num_hidden_layers"] == _GEMMAS_BY_WIDTH[config["model_type"]]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _check_tensors(file: GGUFFile, config: dict[str, Any]) -> None:
    """Refuse metadata that the tensors contradict, before they are converted."""
    blocks = [int(match[1]) for name in file.tensors if (match := _BLOCK.match(name))]
    stated, found = config["num_hidden_layers"], max(blocks, default=-1) + 1
    if found not in (stated, stated + config.get("num_nextn_predict_layers", 0)):
        raise WeightError(
            f"{file.path}: block_count is {stated}, and the file holds {found} blocks of tensors"
        )
    embedding = file.tensors["token_embd.weight"].shape
    if embedding[1:] != (config["hidden_size"],):
        raise WeightError(
            f"{file.path}: embedding_length is {config['hidden_size']}, and token_embd.weight is "
            f"{list(embedding)}"
        )


def generation_config_dict(file: GGUFFile) -> dict[str, Any]:
    """The content of `generation_config.json`: the tokens that end a text or a turn."""
    ids = _token_ids(file, ("eos", "eot", "eom"))
    ends = sorted(set(ids.values()))
    found: dict[str, Any] = _token_ids(file, ("bos", "pad"))
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _token_ids(file: GGUFFile, names: tuple[str, ...]) -> dict[str, int]:
    keys = {"pad": "padding"}
    found = {}
    for name in names:
        value = file.metadata.get(f"tokenizer.ggml.{keys.get(name, name)}_token_id", int)
        if value is not None:
            found[f"{name}_token_id"] = value
    return found


def _rope_parameters(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """With the part of each head that is rotated, where it is not all."""
    if architecture_of(file).is_latent:
        return _scaling(file, config)
    size, rotated = head_sizes(file)
    partial = {} if rotated == size else {"partial_rotary_factor": rotated / size}
    parameters = {**_scaling(file, config), **partial}
    theta = architecture_of(file).window_theta
    if theta is None:
        return parameters
    theta = file.metadata.get(f"{file.architecture}.rope.freq_base_swa", float, theta)
    local = {"rope_type": "default", "rope_theta": theta}
    return {"full_attention": parameters, "sliding_attention": local}


def _scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    metadata, own = file.metadata, f"{file.architecture}.rope."
    theta = metadata.get(own + "freq_base", float, _DEFAULT_ROPE_THETA)
    if "rope_freqs.weight" in file.tensors:
        return _llama3_parameters(file, theta, config["head_dim"])
    if "rope_factors_long.weight" in file.tensors:
        return _longrope_parameters(file, theta, config)
    kind = metadata.get(own + "scaling.type", str, "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{file.path}: rope scaling {kind!r} is not supported in GGUF files; "
            f"supported are none, linear and yarn"
        )
    parameters = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": metadata.require(own + "scaling.factor", float),
    }
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = metadata.require(
            own + "scaling.original_context_length", int
        )
        if not architecture_of(file).rounds_yarn:
            parameters["truncate"] = False
    architecture = architecture_of(file)
    if architecture.is_latent:
        # A tenth of `mscale_all_dim`, which is `mscale` in every published configuration.
        parameters |= _yarn_additions(file, 10)
    if architecture.scales_queries:
        parameters |= _yarn_additions(file, 1)
        temperature = metadata.require(f"{file.architecture}.{TEMPERATURE}", float)
        parameters["llama_4_scaling_beta"] = temperature
    return parameters


def _yarn_additions(file: GGUFFile, unit: int) -> dict[str, float]:
    """Those of DeepSeek and Ministral 3; `yarn_log_multiplier` times `unit` is both mscales."""
    own = f"{file.architecture}.rope.scaling.yarn_"
    metadata = file.metadata
    found = {
        name: metadata.require(own + name, float)
        for name in ("beta_fast", "beta_slow")
        if own + name in metadata
    }
    if (multiplier := metadata.get(own + "log_multiplier", float)) is not None:
        found["mscale"] = found["mscale_all_dim"] = round(multiplier * unit, 6)
    return found


def _llama3_parameters(file: GGUFFile, theta: float, size: int) -> dict[str, Any]:
    """Llama 3.1's RoPE scaling, which GGUF files store as a divisor of each frequency."""
    stored = _float_values(file, "rope_freqs.weight")
    scaling = {"factor": float(stored.max()), **_LLAMA3_SCALING}
    expected = _llama3_divisors(theta, size, scaling)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ConfigError(
            f"{file.path}: the frequency factors of rope_freqs.weight are not Llama 3.1's scaling"
        )
    return {"rope_type": "llama3", "rope_theta": theta, **scaling}


def _longrope_parameters(file: GGUFFile, theta: float, config: dict[str, Any]) -> dict[str, Any]:
    """Phi-3's: a divisor of each frequency within the original context, and one beyond it. A file
    that does not say what was the original context means its own.
    """
    own = f"{file.architecture}.rope.scaling."
    context = int(config["max_position_embeddings"])
    original = file.metadata.get(own + "original_context_length", int, context)
    config["original_max_position_embeddings"] = original
    parameters = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": _float_values(file, "rope_factors_short.weight").tolist(),
        "long_factor": _float_values(file, "rope_factors_long.weight").tolist(),
        "original_max_position_embeddings": original,
    }
    factor = file.metadata.get(own + "attn_factor", float)
    return parameters if factor is None else {**parameters, "attention_factor": factor}


def _float_values(file: GGUFFile, name: str) -> np.ndarray:
    """A float32 tensor.

    Raises:
        WeightError: when there is none.
    """
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind != GGMLQuantizationType.F32:
        raise WeightError(f"{file.path} lacks the float32 tensor {name}")
    with tensor.path.open("rb") as handle:
        handle.seek(tensor.offset)
        return np.fromfile(handle, "<f4", tensor.num_bytes // 4)


def _llama3_divisors(theta: float, size: int, scaling: dict[str, float]) -> np.ndarray:
    """The divisor of each frequency. Source: transformers' `llama3` RoPE initialisation."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / scaling["factor"] + smooth))
