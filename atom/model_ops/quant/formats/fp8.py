"""`quant_method: fp8`: DeepSeek's FP8, 128x128 blocks or whole tensors.

Source: DeepSeek-V3's checkpoints and its `README_WEIGHTS.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atom.config import ConfigError
from atom.model_ops.quant.base import (
    IN,
    OUT,
    Axis,
    Header,
    LayerKind,
    QuantConfig,
    QuantMethod,
    StoredTensor,
    largest,
    per_row,
)
from atom.model_ops.quant.names import (
    find_header,
    modules_above,
    read_flag,
    read_names,
    same_for_all,
)
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat

_BLOCK = 128
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


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
        if kind == "head" or prefix in self.ignored:
            return None
        if same_for_all(prefix, parts, self._format_of) is None:
            return None
        if not self.has_blocks:
            return Fp8TensorMethod(self.is_static)
        header = find_header(self.headers, prefix, parts, "weight_scale_inv")
        has_exponents = header is not None and header.dtype in _EXPONENTS
        return Fp8BlockMethod(has_exponents, self.has_powers)

    def _format_of(self, name: str) -> str | None:
        return None if any(name in self.ignored for name in modules_above(name)) else "fp8"


class Fp8BlockMethod:
    """`weight` e4m3fn, `weight_scale_inv` [out / 128, in / 128], multiplied despite its name."""

    def __init__(self, has_exponents: bool, has_powers: bool) -> None:
        self.format = WeightFormat(
            "fp8",
            _BLOCK,
            _BLOCK,
            "e8m0" if has_exponents else "float",
            activations=Activations("fp8", _BLOCK, "e8m0" if has_powers else "float"),
        )
        blocks = (Axis("out", _BLOCK), Axis("in", _BLOCK))
        self.stored = {
            "weight": StoredTensor((OUT, IN), torch.float8_e4m3fn),
            "weight_scale_inv": StoredTensor(blocks, torch.uint8, "exponents")
            if has_exponents
            else StoredTensor(blocks, torch.float32, "numbers"),
        }

    def read(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {name: tensor}

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        return QuantWeights(self.format, tensors["weight"], tensors["weight_scale_inv"])


class Fp8TensorMethod:
    """`weight` e4m3fn, `weight_scale` of the whole tensor, and `input_scale` if static."""

    def __init__(self, is_static: bool) -> None:
        self.format = WeightFormat(
            "fp8", has_row_scale=True, activations=Activations("fp8", is_static=is_static)
        )
        scalar = StoredTensor((), torch.float32, "numbers")
        self.stored = {
            "weight": StoredTensor((OUT, IN), torch.float8_e4m3fn),
            "weight_scale": scalar,
        }
        if is_static:
            self.stored["input_scale"] = scalar

    def read(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {name: tensor}

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        how, static = self.format.activations, tensors.get("input_scale")
        assert how is not None
        return QuantWeights(
            self.format,
            tensors["weight"],
            row_scale=per_row(tensors["weight_scale"], rows),
            input_scale=None if static is None else largest(static, how),
        )
