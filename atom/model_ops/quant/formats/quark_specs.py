"""What Quark's configuration says of one kind of layer.

A `QuantizationSpec` describes how one tensor is quantised; weights and inputs have a list of them,
one per stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom.config import ConfigError
from atom.model_ops.quant.base import read_size
from atom.model_ops.quant.weights import Activations, ScaleType

_CONFIG_KEYS = ("weight", "input_tensors", "output_tensors", "bias", "target_device")


@dataclass(frozen=True)
class Spec:
    """One stage of a tensor's quantisation, with Quark's names."""

    dtype: str
    qscheme: str
    group_size: int
    block_size: tuple[int, ...]
    symmetric: bool
    is_dynamic: bool
    scale_format: str | None

    def __str__(self) -> str:
        size = list(self.block_size) if self.qscheme == "per_block" else self.group_size or ""
        return f"{self.dtype} {self.qscheme} {size}".strip()

    @property
    def has_exponents(self) -> bool:
        return self.scale_format == "e8m0"


@dataclass(frozen=True)
class LayerSpecs:
    """How the layers of one configuration are quantised; `inputs` is empty if they are not."""

    weight: tuple[Spec, ...]
    inputs: tuple[Spec, ...]

    def __str__(self) -> str:
        inputs = f" x {list_specs(self.inputs)}" if self.inputs else ""
        return list_specs(self.weight) + inputs


def list_specs(specs: tuple[Spec, ...]) -> str:
    return " + ".join(str(spec) for spec in specs) or "unquantised"


def read_layer(config: object, where: str, keeps_scales: bool = False) -> LayerSpecs | None:
    """The specs of one configuration; None if it leaves weights unquantised.

    Args:
        where: its key, for errors.
        keeps_scales: outputs may be FP8 with a static scale: that of the KV cache.

    Raises:
        ConfigError: for keys that change the computation in ways that are not supported.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"quantization_config: {where}={config!r} is no object")
    unknown = [key for key, value in config.items() if key not in _CONFIG_KEYS and value]
    if config.get("bias"):
        unknown.append("bias")
    if outputs := _read_specs(config.get("output_tensors"), f"{where}.output_tensors"):
        stages = [(spec.dtype, spec.qscheme, spec.is_dynamic) for spec in outputs]
        if not keeps_scales or stages != [("fp8_e4m3", "per_tensor", False)]:
            unknown.append("output_tensors")
    if unknown:
        raise ConfigError(f"quantization_config: {where}.{unknown[0]} is not supported")
    weight = _read_specs(config.get("weight"), f"{where}.weight")
    inputs = _read_specs(config.get("input_tensors"), f"{where}.input_tensors")
    if inputs and not weight:
        raise ConfigError(f"quantization_config: {where} quantises inputs, but not weights")
    return LayerSpecs(weight, inputs) if weight else None


def _read_specs(given: object, where: str) -> tuple[Spec, ...]:
    stages = given if isinstance(given, list) else [given] if given else []
    return tuple(_read_spec(stage, where) for stage in stages)


def _read_spec(given: Any, where: str) -> Spec:
    try:
        spec = Spec(
            str(given["dtype"]),
            str(given["qscheme"]),
            given.get("group_size") or 0,
            tuple(given.get("block_size") or ()),
            given.get("symmetric") is not False,
            bool(given.get("is_dynamic")),
            given.get("scale_format"),
        )
        axis, element = given.get("ch_axis"), given.get("mx_element_dtype")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"quantization_config: {where}={given!r} is no specification") from error
    key = f"quantization_config: {where}"
    if spec.qscheme == "per_group":
        read_size(key, "group_size", spec.group_size)
    if spec.qscheme == "per_block":
        for size in spec.block_size:
            read_size(key, "block_size", size)
    mode = given.get("scale_calculation_mode")
    if spec.is_dynamic and spec.dtype == "fp4" and mode not in (None, "even"):
        raise ConfigError(
            f"quantization_config: {where}.scale_calculation_mode={mode!r} is not supported, only "
            f"'even'"
        )
    if element is not None:
        raise ConfigError(
            f"quantization_config: {where}.mx_element_dtype={element!r} is not supported"
        )
    axes = {"per_channel": (0,), "per_group": (-1, 1)}.get(spec.qscheme)
    if where.endswith(".weight") and axes and axis not in (None, *axes):
        raise ConfigError(f"quantization_config: {where}.ch_axis={axis} of {spec}")
    return spec


def read_activations(inputs: tuple[Spec, ...]) -> tuple[Activations | None, str | None]:
    """How inputs are quantised, and the name of the checkpoint's scale for it.

    A dynamic scale per tensor is one per token here: a token's result must not depend on others.

    Raises:
        ConfigError: when it is not supported.
    """
    if not inputs:
        return None, None
    first = inputs[0]
    kinds = [(spec.dtype, spec.qscheme) for spec in inputs]
    if kinds == [("fp4", "per_group"), ("fp8_e4m3", "per_tensor")] and first.group_size == 16:
        return Activations("fp4", 16, "e4m3"), "input_scale_2"
    if len(inputs) == 1 and first.is_dynamic:
        powers: ScaleType = "e8m0" if first.has_exponents else "float"
        if kinds == [("fp4", "per_group")] and first.has_exponents:
            return Activations("fp4", first.group_size, powers), None
        if kinds == [("fp8_e4m3", "per_group")]:
            return Activations("fp8", first.group_size, powers), None
        if kinds == [("fp8_e4m3", "per_block")] and first.block_size[:-1] == (1,):
            return Activations("fp8", first.block_size[-1], powers), None
        if first.dtype == "fp8_e4m3" and first.qscheme in ("per_tensor", "per_channel"):
            return Activations("fp8"), None
    if kinds == [("fp8_e4m3", "per_tensor")]:
        return Activations("fp8", is_static=True), "input_scale"
    scale = "dynamic" if first.is_dynamic else "static"
    raise ConfigError(
        f"quantization_config: input_tensors of {list_specs(inputs)} ({scale}, "
        f"scale_format={first.scale_format}) are not supported"
    )
