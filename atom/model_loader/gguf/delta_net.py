"""Gated DeltaNet in GGUF files: the order of heads, and names of prediction layers.

Source: llama.cpp's converter of Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

# What a prediction layer has besides a layer's parts, and the checkpoint's name of it.
_PREDICTION = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def prediction_name(name: str, num_layers: int) -> str:
    """The checkpoint's name of what GGUF has in the layer behind the last."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.(\w+)", name)
    if match is None or int(match[1]) < num_layers:
        return name
    module = match[2]
    if module in _PREDICTION:
        return f"mtp.{_PREDICTION[module]}.{match[3]}"
    return f"mtp.layers.{int(match[1]) - num_layers}.{module}.{match[3]}"


def row_order(name: str, stored: str, tiles: bool, config: Mapping[str, Any]) -> np.ndarray | None:
    """The stored rows of a checkpoint's tensor, in its order; None where it is the same.

    Args:
        tiles: whether heads of values lie by their number within a head of keys.
    """
    match = re.search(r"\.linear_attn\.(\w+)(\.weight)?$", name)
    if match is None:
        return None
    module = match[1]
    if ".ssm_ba." in stored:
        key_heads, repeats = _heads(config)
        by_head = np.arange(2 * key_heads * repeats).reshape(key_heads, 2, repeats)
        return by_head[:, int(module == "in_proj_a")].reshape(-1)
    if not tiles:
        return None
    size = config["linear_value_head_dim"]
    if module in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return _untiled(config, 1)
    if module == "in_proj_z":
        return _untiled(config, size)
    if module in ("in_proj_qkv", "conv1d"):
        keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return np.concatenate((np.arange(keys), keys + _untiled(config, size)))
    return None


def column_order(name: str, tiles: bool, config: Mapping[str, Any]) -> np.ndarray | None:
    """The same of columns."""
    if tiles and name.endswith(".linear_attn.out_proj.weight"):
        return _untiled(config, config["linear_value_head_dim"])
    return None


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Of keys, and of values for each."""
    key_heads = config["linear_num_key_heads"]
    return key_heads, config["linear_num_value_heads"] // key_heads


def _untiled(config: Mapping[str, Any], size: int) -> np.ndarray:
    """Elements of heads of values by heads of keys."""
    key_heads, repeats = _heads(config)
    elements = np.arange(key_heads * repeats * size).reshape(repeats, key_heads, size)
    return np.ascontiguousarray(elements.swapaxes(0, 1)).reshape(-1)
