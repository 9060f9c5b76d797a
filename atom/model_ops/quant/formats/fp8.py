"""`quant_method: fp8`: DeepSeek's FP8, 128x128 blocks or whole tensors.

Source: DeepSeek-V3's checkpoints and its `README_WEIGHTS.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom.config import ConfigError
from atom.model_ops.quant.base import Header, LayerKind, QuantConfig, QuantMethod
from atom.model_ops.quant.names import (
    find_header,
    modules_above,
    read_flag,
    read_names,
    same_for_all,
)
from atom.model_ops.quant.scaled import ScaledMethod, ScaleNames
from atom.model_ops.quant.scales import scale_type
from atom.model_ops.quant.weights import Activations, WeightFormat

_BLOCK = 128
# The scale is multiplied despite its name.
_BLOCK_NAMES = ScaleNames(scale="weight_scale_inv")


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    read_flag(config, "fmt", ("e4m3",), "e4m3")
    read_flag(config, "expert_dtype", ("fp8",), "fp8")
    read_flag(config, "store_dtype", ("fp8",), "fp8")
    block = config.get("weight_block_size")
    if block is not None and block != [_BLOCK, _BLOCK]:
        raise ConfigError(
            f"quantization_config: weight_block_size={block} is not supported, only "
            f"{[_BLOCK, _BLOCK]}"
        )
    static = read_flag(config, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    if static and block is not None:
        raise ConfigError("quantization_config: activation_scheme=static with weight_block_size")
    powers = read_flag(config, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    ignored = (
        name
        for key in ("modules_to_not_convert", "ignored_layers")
        for name in read_names(key, config.get(key))
    )
    return Fp8Config(block is not None, static, powers, frozenset(ignored), headers)


@dataclass(frozen=True)
class Fp8Config:
    """Attributes:
    has_blocks: one scale per 128x128 weights, not per tensor.
    is_static: activations have a scale in the checkpoint.
    has_powers: scales are powers of two; those of activations, too.
    ignored: modules that are not quantised; a name stands for all modules below it, too.
    """

    has_blocks: bool
    is_static: bool
    has_powers: bool
    ignored: frozenset[str]
    headers: Mapping[str, Header]

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind in ("head", "embedding") or prefix in self.ignored:
            return None
        if same_for_all(prefix, parts, self._format_of) is None:
            return None
        if not self.has_blocks:
            inputs = Activations("fp8", is_static=self.is_static)
            return ScaledMethod(WeightFormat("fp8", has_row_scale=True, activations=inputs))
        inputs = Activations("fp8", _BLOCK, "e8m0" if self.has_powers else "float")
        scales = scale_type(find_header(self.headers, prefix, parts, _BLOCK_NAMES.scale))
        form = WeightFormat("fp8", _BLOCK, _BLOCK, scales, activations=inputs)
        return ScaledMethod(form, _BLOCK_NAMES)

    def _format_of(self, name: str) -> str | None:
        if self.ignored and any(name in self.ignored for name in modules_above(name)):
            return None
        return "fp8"
