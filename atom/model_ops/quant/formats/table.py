"""The formats that checkpoints name in `quantization_config`: one module of this folder each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from atom.config import ConfigError
from atom.model_ops.quant.base import Header, QuantConfig

# `quant_method` -> the module whose `parse(config, headers)` reads the rest.
_MODULES = {
    "awq": "awq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "quark",
}


def parse_quantization(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """The quantisation that a checkpoint's `quantization_config` describes.

    Args:
        headers: of all tensors of the checkpoint, by name.

    Raises:
        ConfigError: when it is not supported, naming the key.
    """
    method = config.get("quant_method")
    if isinstance(method, str) and method.startswith("modelopt_"):  # such as modelopt_fp4
        method = "modelopt"
    if not isinstance(method, str) or method not in _MODULES:
        raise ConfigError(
            f"quant_method={method!r} is not supported; supported: {', '.join(_MODULES)}"
        )
    module = import_module(f"atom.model_ops.quant.formats.{_MODULES[method]}")
    parsed: QuantConfig = module.parse(config, headers)
    return parsed
