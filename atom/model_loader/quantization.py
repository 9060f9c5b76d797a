"""Reads how a checkpoint's weights are quantised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atom.config import ConfigError
from atom.model_loader.checkpoint import has_weights, list_tensors
from atom.model_ops.quant.base import Header, QuantConfig, UnquantizedConfig
from atom.model_ops.quant.formats import parse_quantization

# Older compressed-tensors files have the second name.
_KEYS = ("quantization_config", "compression_config")


def read_quantization(folder: Path, raw: Mapping[str, Any], with_weights: bool) -> QuantConfig:
    """The quantisation of a checkpoint; `UnquantizedConfig` if there is none.

    Args:
        raw: the content of config.json.
        with_weights: whether the headers of weight files are to be read.

    Raises:
        ConfigError: when it is not supported, naming the key.
        WeightError: when a weight file is damaged.
    """
    stated = _stated(raw)
    if stated is None:
        return UnquantizedConfig()
    if not isinstance(stated, dict):
        raise ConfigError(f"{folder / 'config.json'}: quantization_config is {stated!r}")
    headers = {}
    if with_weights and has_weights(folder):
        headers = {t.name: Header(t.torch_dtype, t.shape) for t in list_tensors(folder)}
    try:
        return parse_quantization(stated, headers)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error


def config_levels(raw: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The configuration, and its `text_config` if it has one."""
    yield raw
    inner = raw.get("text_config")
    if isinstance(inner, dict):
        yield inner


def _stated(raw: Mapping[str, Any]) -> object:
    for level in config_levels(raw):
        for key in _KEYS:
            if level.get(key) is not None:
                return level[key]
    return None
