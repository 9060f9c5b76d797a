"""Reads how a checkpoint's weights are quantised."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atom.config import ConfigError, ModelOptions
from atom.model_loader.checkpoint import has_weights, list_tensors
from atom.model_loader.errors import name_some
from atom.model_ops.quant.base import Header, QuantConfig, UnquantizedConfig
from atom.model_ops.quant.formats.online import OnlineConfig
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.names import names_module
from atom.models.config.file import is_there, read_json_object
from atom.platform import Platform

logger = logging.getLogger(__name__)

# Older compressed-tensors files have the second name.
_KEYS = ("quantization_config", "compression_config")
# ModelOpt writes it; newer versions describe the same in config.json, too.
_MODELOPT = "hf_quant_config.json"


def read_quantization(folder: Path, raw: Mapping[str, Any], with_weights: bool) -> QuantConfig:
    """The quantisation of a checkpoint; `UnquantizedConfig` if there is none.

    Args:
        raw: the content of config.json.
        with_weights: whether the headers of weight files are to be read.

    Raises:
        ConfigError: when it is not supported, naming the key.
        WeightError: when a weight file is damaged.
    """
    path, stated = _stated(folder, raw)
    if stated is None:
        return UnquantizedConfig()
    if not isinstance(stated, dict):
        raise ConfigError(f"{path}: quantization_config is {stated!r}")
    headers = {}
    if with_weights and has_weights(folder):
        headers = {t.name: Header(t.torch_dtype, t.shape) for t in list_tensors(folder)}
    try:
        return parse_quantization(stated, headers)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def choose_quantization(folder: Path, raw: Mapping[str, Any], options: ModelOptions) -> QuantConfig:
    """The quantisation of a target: the checkpoint's, or what `--quantization` makes of it.

    Raises:
        ConfigError, WeightError: as `read_quantization`; and when the options are of no use.
    """
    chosen = _choose(folder, raw, options)
    if options.activations != "auto" and isinstance(chosen, UnquantizedConfig):
        raise ConfigError(
            f"{folder}: the weights are not quantised, so --activations {options.activations} "
            f"would have no effect; leave it out"
        )
    return chosen


def _choose(folder: Path, raw: Mapping[str, Any], options: ModelOptions) -> QuantConfig:
    stored = read_quantization(folder, raw, with_weights=options.load_format != "dummy")
    if options.quantization == "auto":
        return stored
    if isinstance(stored, UnquantizedConfig):
        if not options.quantises:
            return stored
        ignored = options.quantization_ignore or ()
        _check_ignored(ignored, folder, options)
        return OnlineConfig(options.quantization, ignored)
    path, stated = _stated(folder, raw)
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if not options.quantises:
        raise ConfigError(
            f"{path}: the weights are quantised (quant_method={method!r}), and --quantization none "
            f"is for weights that are not, and for GGUF files; leave it out"
        )
    if method != options.quantization:
        raise ConfigError(
            f"{path}: the weights are quantised already (quant_method={method!r}), so they cannot "
            f"be quantised to {options.quantization}; leave --quantization out"
        )
    if options.quantization_ignore is not None:
        raise ConfigError(
            f"{path}: the weights are quantised already, so --quantization-ignore would have no "
            f"effect; leave it out"
        )
    return stored


def on_platform(quantization: QuantConfig, platform: Platform) -> QuantConfig:
    """Online quantisation to integers includes embedding and head on a CPU, which reads the head
    in every step and has a product for it.
    """
    if not isinstance(quantization, OnlineConfig) or platform.is_gpu:
        return quantization
    return replace(quantization, with_vocabulary=quantization.name in ("int8", "int4"))


def _check_ignored(patterns: Iterable[str], folder: Path, options: ModelOptions) -> None:
    """Refuse patterns that name no module with a matrix."""
    if options.load_format == "dummy":
        for pattern in patterns:
            logger.warning("no weight files, so --quantization-ignore %s is not checked", pattern)
        return
    modules = [t.name.removesuffix(".weight") for t in list_tensors(folder) if len(t.shape) > 1]
    for pattern in patterns:
        if not any(names_module(pattern, module) for module in modules):
            raise ConfigError(
                f"--quantization-ignore {pattern} names no module of {folder}, which has "
                f"{name_some(modules)}"
            )


def config_levels(raw: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The configuration, and its `text_config` if it has one."""
    yield raw
    inner = raw.get("text_config")
    if isinstance(inner, dict):
        yield inner


def _stated(folder: Path, raw: Mapping[str, Any]) -> tuple[Path, object]:
    """What describes the quantisation, and its file; None if nothing does."""
    path = folder / "config.json"
    for level in config_levels(raw):
        for key in _KEYS:
            if level.get(key) is not None:
                return path, level[key]
    path = folder / _MODELOPT
    if not is_there(path):
        return path, None
    return path, {**read_json_object(path), "quant_method": "modelopt"}
