"""`quant_method: compressed-tensors`, which llm-compressor and Moonshot's Kimi write.

Modules are named in `targets` and `ignore` as in the checkpoint: `re:` and a regular expression
that fits the beginning of the name, the name itself, or `Linear`, the class of all.

Source: the package `compressed-tensors`; Kimi-K2.5's config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from atom.config import ConfigError
from atom.model_ops.quant.base import (
    Header,
    LayerKind,
    QuantConfig,
    QuantMethod,
    UnquantizedConfig,
)
from atom.model_ops.quant.formats.compressed_scheme import Scheme, read_scheme
from atom.model_ops.quant.formats.packed_integers import PackedIntegers
from atom.model_ops.quant.names import (
    find_header,
    read_flag,
    read_names,
    read_object,
    same_for_all,
)
from atom.model_ops.quant.patterns import PatternReader
from atom.model_ops.quant.scaled import ScaledMethod, ScaleNames
from atom.model_ops.quant.scales import scale_dtype
from atom.model_ops.quant.weights import Codes, ScaleType, WeightFormat

_CLASS = "Linear"

T = TypeVar("T")


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    # Older tools kept the status of calibration when they compressed.
    read_flag(config, "quantization_status", ("compressed", "frozen"), "compressed")
    _refuse_transforms(config)
    _check_cache(config.get("kv_cache_scheme"))
    groups = read_object("config_groups", config.get("config_groups"))
    if not groups:
        return _unquantised(config)
    targets: list[tuple[str, Scheme]] = []
    for name, group in groups.items():
        named = group.get("targets") if isinstance(group, Mapping) else group
        scheme = read_scheme(name, group, config.get("format"))
        if named is None:
            raise ConfigError(f"quantization_config: config_groups.{name} has no targets")
        listed = read_names(f"config_groups.{name}.targets", named)
        targets += [(target, scheme) for target in listed]
    ignored = ((entry, True) for entry in read_names("ignore", config.get("ignore")))
    return CompressedTensorsConfig(Modules("targets", targets), Modules("ignore", ignored), headers)


class Modules(Generic[T]):
    """What a list says of the modules that it names; names come before expressions."""

    def __init__(self, key: str, entries: Iterable[tuple[str, T]]) -> None:
        reader = PatternReader(key)
        self.names: dict[str, T] = {}
        self._expressions: list[tuple[re.Pattern[str], T]] = []
        for entry, value in entries:
            if entry.startswith("re:"):
                expression = reader.expression(entry.removeprefix("re:"), entry)
                self._expressions.append((expression, value))
            else:
                self.names.setdefault(entry, value)

    def find(self, name: str) -> T | None:
        """None if the list does not name it; a class names none."""
        if name in self.names:
            return self.names[name]
        return next((value for expr, value in self._expressions if expr.match(name)), None)


@dataclass(frozen=True)
class CompressedTensorsConfig:
    """Attributes:
    targets: a module's scheme; that of its class only if none has its name.
    ignored: modules that are not quantised.
    """

    targets: Modules[Scheme]
    ignored: Modules[bool]
    headers: Mapping[str, Header]

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind == "embedding":
            return None
        scheme = self._scheme(prefix, parts, self._is_linear(prefix, kind))
        if scheme is None:
            return None
        header = find_header(self.headers, prefix, parts, "weight_scale")
        dtype = scale_dtype(header)
        if scheme.layout != "pack-quantized":
            return _scaled(scheme, dtype)
        num_groups = None
        if self._is_reordered(scheme, prefix, parts):
            if kind == "experts":
                raise ConfigError(f"{prefix}: weight_g_idx of experts is not supported")
            num_groups = header.shape[-1] if header is not None and header.shape else 1
        return PackedIntegers(
            scheme.bits,
            scheme.block[1],
            scheme.has_zeros,
            scheme.activations,
            dtype,
            num_groups,
        )

    def _is_reordered(self, scheme: Scheme, prefix: str, parts: Sequence[str]) -> bool:
        """Whether the weight files have, or should have, the group of each input."""
        stored = find_header(self.headers, prefix, parts, "weight_g_idx") is not None
        return scheme.strategy == "group" and (
            stored or (scheme.is_reordered and bool(self.headers))
        )

    def _is_linear(self, prefix: str, kind: LayerKind) -> bool:
        """Whether `Linear` is the layer's class.

        Heads are hardly ever quantised, and Kimi's `ignore` has not the head's whole name, so
        there the weight files decide.
        """
        return kind != "head" or f"{prefix}.weight_scale" in self.headers

    def _scheme(self, prefix: str, parts: Sequence[str], is_linear: bool) -> Scheme | None:
        """Of the layer itself if its name is listed, else of its parts, which must agree."""
        if prefix in self.ignored.names:
            return None
        if parts and prefix in self.targets.names:
            return self.targets.names[prefix]

        def of_name(name: str) -> Scheme | None:
            if self.ignored.find(name) or (is_linear and _CLASS in self.ignored.names):
                return None
            scheme = self.targets.find(name)
            if scheme is None and is_linear:
                return self.targets.names.get(_CLASS)
            return scheme

        if parts and not any(self.ignored.find(p) or self.targets.find(p) for p in parts):
            # An expression such as `re:.*qkv_proj` is of a name that the weight files lack.
            return of_name(prefix)
        return same_for_all(prefix, parts, of_name)


def _scaled(scheme: Scheme, dtype: torch.dtype) -> ScaledMethod:
    codes: Codes = "int8" if not scheme.is_float else "fp4" if scheme.bits == 4 else "fp8"
    has_global = scheme.strategy == "tensor_group"
    scale_type: ScaleType = "e4m3" if has_global else "float"
    if scheme.layout.startswith("mx"):
        scale_type = "e8m0"
    form = WeightFormat(
        codes,
        *scheme.block,
        scale_type,
        has_row_scale=has_global or not scheme.block[1],
        activations=scheme.activations,
    )
    names = ScaleNames("weight_packed" if codes == "fp4" else "weight")
    if has_global:
        names = replace(
            names,
            factor="weight_global_scale",
            inputs="input_global_scale",
            are_divisors=True,
        )
    return ScaledMethod(form, names, scheme.strategy == "channel", dtype)


def _unquantised(config: Mapping[str, Any]) -> UnquantizedConfig:
    """A checkpoint may quantise the cache alone; its weights are plain numbers."""
    stated = config.get("format")
    if stated != "dense" and config.get("kv_cache_scheme") is None:
        raise ConfigError(f"quantization_config: format={stated!r} without config_groups")
    return UnquantizedConfig()


def _refuse_transforms(config: Mapping[str, Any]) -> None:
    """What changes weights or inputs otherwise than by rounding."""
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ConfigError(
            f"quantization_config: sparsity_config={sparsity!r} is not supported; supported: "
            f"format 'dense'"
        )
    for key in ("transform_config", "moe_sparsity_config"):
        if config.get(key):
            raise ConfigError(f"quantization_config: {key}={config[key]!r} is not supported")


def _check_cache(scheme: object) -> None:
    """The cache's scales are loaded; `--kv-cache-dtype` decides whether they are used."""
    if scheme is None:
        return
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    if not isinstance(scheme, Mapping) or any(scheme.get(k) != v for k, v in wanted.items()):
        raise ConfigError(
            f"quantization_config: kv_cache_scheme={scheme!r} is not supported; supported: {wanted}"
        )
