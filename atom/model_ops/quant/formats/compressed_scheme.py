"""Reads one of compressed-tensors' `config_groups`: how weights and inputs are quantised.

Source: the package `compressed-tensors`, `QuantizationArgs` and `QuantizationScheme`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from atom.config import ConfigError
from atom.model_ops.quant.base import read_size
from atom.model_ops.quant.weights import Activations

_WHERE = "quantization_config: config_groups"


class _Layout(NamedTuple):
    """The numbers that a `format` can store.

    Attributes:
        numbers: num_bits and type.
        group_size: the only one; None for any.
    """

    numbers: tuple[tuple[int, str], ...]
    strategies: tuple[str, ...]
    group_size: int | None = None


_INTEGERS = (4, "int"), (8, "int")
_FLOATS = ((8, "float"),)
_UNPACKED = "tensor", "channel", "group"
_LAYOUTS = {
    "pack-quantized": _Layout(_INTEGERS, ("channel", "group")),
    "int-quantized": _Layout(_INTEGERS, _UNPACKED),
    "float-quantized": _Layout(_FLOATS, (*_UNPACKED, "block")),
    "naive-quantized": _Layout((*_INTEGERS, *_FLOATS), (*_UNPACKED, "block")),
    "nvfp4-pack-quantized": _Layout(((4, "float"),), ("tensor_group",), 16),
    "mxfp4-pack-quantized": _Layout(((4, "float"),), ("group",), 32),
    "mxfp8-quantized": _Layout(_FLOATS, ("group",), 32),
}

_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_INT8_ROWS = {"num_bits": 8, "type": "int", "strategy": "channel"}
_INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_FP8_TOKENS = {**_FP8, "strategy": "token", "dynamic": True}
_FP8_BLOCKS = {**_FP8, "strategy": "block", "block_structure": [128, 128]}
_FP8_GROUPS = {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_MXFP8 = {**_MXFP4, "num_bits": 8, "scale_dtype": "torch.uint8"}
# The weights and inputs of groups that are a name and a list of targets.
_PRESETS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "W4A16": (_INT4, None),
    "W4A16_ASYM": ({**_INT4, "symmetric": False}, None),
    "W8A16": ({**_INT4, "num_bits": 8}, None),
    "W8A8": (_INT8_ROWS, _INT8_TOKENS),
    "INT8": (_INT8_ROWS, _INT8_TOKENS),
    "W4A8": (_INT4, _INT8_TOKENS),
    "W4AFP8": (_INT4, _FP8_TOKENS),
    "FP8": (_FP8, _FP8),
    "FP8_DYNAMIC": ({**_FP8, "strategy": "channel"}, _FP8_TOKENS),
    "FP8_BLOCK": (_FP8_BLOCKS, _FP8_GROUPS),
    "NVFP4A16": (_NVFP4, None),
    "NVFP4": (_NVFP4, {**_NVFP4, "dynamic": "local"}),
    "MXFP4A16": (_MXFP4, None),
    "MXFP4": (_MXFP4, {**_MXFP4, "dynamic": True}),
    "MXFP4XFP8": (_MXFP4, _FP8_GROUPS),
    "MXFP8A16": (_MXFP8, None),
    "MXFP8": (_MXFP8, {**_MXFP8, "dynamic": True}),
}


@dataclass(frozen=True)
class Scheme:
    """How a layer is stored.

    Attributes:
        layout: the `format`.
        strategy: of the weights' scales: `tensor`, `channel`, `group`, `tensor_group` or `block`.
        block: weights per scale, outputs and inputs; 0, 0 for `tensor` and `channel`.
        is_reordered: inputs were sorted before they were grouped; `weight_g_idx` has their groups.
    """

    layout: str
    bits: int
    is_float: bool
    strategy: str
    block: tuple[int, int]
    has_zeros: bool
    is_reordered: bool
    activations: Activations | None

    def __str__(self) -> str:
        rows, columns = self.block
        size = f" {rows}x{columns}" if rows > 1 else f" {columns}" if columns else ""
        inputs = "" if self.activations is None else f" x {self.activations}"
        kind = "float" if self.is_float else "int"
        return f"{self.layout} {kind}{self.bits} per {self.strategy}{size}{inputs}"


def read_scheme(name: str, group: object, default_format: object) -> Scheme:
    """The scheme of group `name`.

    Args:
        group: its value; a list (of targets) for a preset.
        default_format: of groups that have none.

    Raises:
        ConfigError: for what is not supported, naming key and value.
    """
    where = f"{_WHERE}.{name}"
    if isinstance(group, Mapping):
        weights, inputs = group.get("weights"), group.get("input_activations")
        layout = group.get("format") or default_format
        if group.get("output_activations") is not None:
            _refuse(where, "output_activations", group["output_activations"], (None,))
    else:
        if name.upper() not in _PRESETS:
            _refuse(_WHERE, "preset", name, tuple(_PRESETS))
        weights, inputs = _PRESETS[name.upper()]
        layout = default_format
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        _refuse(where, "format", layout, tuple(_LAYOUTS))
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{where}: weights={weights!r}: only inputs would be quantised")
    activations = None
    if inputs is not None:
        activations = _activations(f"{where}.input_activations", inputs)
    return _scheme(f"{where}.weights", layout, weights, activations)


def _scheme(
    where: str, layout: str, weights: Mapping[str, Any], activations: Activations | None
) -> Scheme:
    allowed = _LAYOUTS[layout]
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if (bits, kind) not in allowed.numbers:
        wanted = " or ".join(f"{b} and {k!r}" for b, k in allowed.numbers)
        raise ConfigError(
            f"{where}: num_bits={bits!r} and type={kind!r} are not supported in format "
            f"{layout!r}; supported: {wanted}"
        )
    _expect(where, weights, "dynamic", False, None)
    is_packed = layout == "pack-quantized"
    if not is_packed:
        _expect(where, weights, "symmetric", True, None)
    strategy = _strategy(weights)
    if strategy not in allowed.strategies:
        _refuse(where, "strategy", strategy, allowed.strategies)
    if is_packed and activations is not None and activations.is_static:
        raise ConfigError(f"{where}: format={layout!r} with static inputs is not supported")
    return Scheme(
        layout,
        bits,
        kind == "float",
        strategy,
        _block(where, strategy, weights, allowed.group_size),
        weights.get("symmetric") is False,
        is_packed and weights.get("actorder") in (True, "group", "dynamic"),
        activations,
    )


def _activations(where: str, inputs: object) -> Activations:
    if not isinstance(inputs, Mapping):
        _refuse(where, "input_activations", inputs, (None,))
    _expect(where, inputs, "symmetric", True, None)
    bits, kind, strategy = inputs.get("num_bits", 8), inputs.get("type", "int"), _strategy(inputs)
    dynamic, size = inputs.get("dynamic", False), inputs.get("group_size")
    match kind, bits, strategy, dynamic:
        case "int", 8, "token", True:
            return Activations("int8")
        case "int", 8, "tensor", False:
            return Activations("int8", is_static=True)
        case "float", 8, "token", True:
            return Activations("fp8")
        case "float", 8, "tensor", False:
            return Activations("fp8", is_static=True)
        case "float", 8, "group", True if size == 32:
            return Activations("fp8", 32, "e8m0")
        case "float", 8, "group", True if size == 128:
            return Activations("fp8", 128)
        case "float", 4, "group", True if size == 32:
            return Activations("fp4", 32, "e8m0")
        case "float", 4, "tensor_group", "local" if size == 16:
            return Activations("fp4", 16, "e4m3")
    raise ConfigError(
        f"{where}: type={kind!r}, num_bits={bits!r}, strategy={strategy!r}, dynamic={dynamic!r}, "
        f"group_size={size!r} is not supported"
    )


def _strategy(numbers: Mapping[str, Any]) -> object:
    """The stated strategy, or the one that `group_size` implies."""
    if (stated := numbers.get("strategy")) is not None:
        return stated
    size = numbers.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _block(
    where: str, strategy: str, weights: Mapping[str, Any], only: int | None
) -> tuple[int, int]:
    if strategy in ("group", "tensor_group"):
        size = weights.get("group_size")
        if only not in (None, size):
            _refuse(where, "group_size", size, (only,))
        return 1, read_size(where, "group_size", size)
    if strategy != "block":
        return 0, 0
    block = weights.get("block_structure")
    sizes = block.split("x") if isinstance(block, str) else block  # older files: "128x128"
    if not isinstance(sizes, list) or len(sizes) != 2:
        _refuse(where, "block_structure", block, ([128, 128],))
    rows, columns = (
        int(size) if isinstance(size, str) and size.isdecimal() and len(size) < 9 else size
        for size in sizes
    )
    return (
        read_size(where, "block_structure", rows),
        read_size(where, "block_structure", columns),
    )


def _expect(where: str, numbers: Mapping[str, Any], key: str, *supported: object) -> None:
    if numbers.get(key) not in supported:
        _refuse(where, key, numbers[key], supported[:1])


def _refuse(where: str, key: str, value: object, supported: Sequence[object]) -> NoReturn:
    listed = ", ".join(str(item) for item in supported)
    raise ConfigError(f"{where}: {key}={value!r} is not supported; supported: {listed}")
