"""`quant_method: quark`: checkpoints of AMD Quark. This file says which layer is stored how.

Source: AMD Quark's exporter and AMD's published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Any

from atom.config import ConfigError
from atom.model_ops.quant.base import Header, LayerKind, QuantConfig, QuantMethod
from atom.model_ops.quant.names import read_flag, same_for_all
from atom.model_ops.quant.quark_methods import create_method
from atom.model_ops.quant.quark_specs import LayerSpecs, read_layer

_PLAIN_NAME = re.compile(r"[\w.-]*")
_WILDCARD = re.compile(r"\*|\?|\[[^]]*\]")
_CACHED = re.compile(r"[kv]_proj")


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    if config.get("softmax_quant_spec"):
        raise ConfigError("quantization_config: softmax_quant_spec is not supported")
    _refuse_online_rotations(config.get("algo_config"))
    export = config.get("export") or {}
    read_flag(export, "weight_format", ("real_quantized",), "real_quantized")
    order = read_flag(export, "pack_method", ("reorder", "order"), "reorder")
    return QuarkConfig(config, order == "reorder", headers)


class QuarkConfig:
    """Configurations by the layer's name, by its type, and for all others; `exclude` before all.

    Args:
        config: the checkpoint's `quantization_config`.
        is_reordered: codes in words are in AWQ's order.
    """

    def __init__(
        self, config: Mapping[str, Any], is_reordered: bool, headers: Mapping[str, Header]
    ) -> None:
        self._is_reordered = is_reordered
        self._headers = headers
        self._global = read_layer(config.get("global_quant_config"), "global_quant_config")
        self._by_name = [
            (
                NamePattern(pattern),
                read_layer(
                    layer, f"layer_quant_config[{pattern!r}]", _CACHED.search(pattern) is not None
                ),
            )
            for pattern, layer in (config.get("layer_quant_config") or {}).items()
        ]
        self._by_type = [
            read_layer(layer, f"layer_type_quant_config[{kind!r}]")
            for kind, layer in (config.get("layer_type_quant_config") or {}).items()
            if re.search(r"\bLinear\b", kind)
        ]
        self._exclude = Exclusions(config.get("exclude") or [])
        self._find = lru_cache(maxsize=None)(self._specs_of)

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if prefix in self._exclude:
            return None
        # Some lists name a single expert for all.
        if kind == "experts" and any(name in self._exclude for name in parts):
            return None
        specs = same_for_all(prefix, parts, self._find)
        if specs is None:
            return None
        return create_method(specs, self._headers, prefix, parts, self._is_reordered)

    def _specs_of(self, name: str) -> LayerSpecs | None:
        if name in self._exclude:
            return None
        for pattern, specs in self._by_name:
            if pattern.matches(name):
                return specs
        return self._by_type[0] if self._by_type else self._global


class NamePattern:
    """A glob for the whole name, or a part of the name."""

    def __init__(self, pattern: str) -> None:
        self._glob = re.compile(translate(pattern)) if "*" in pattern else None
        pieces = _WILDCARD.split(pattern) if self._glob else [pattern]
        self._longest_piece = max(pieces, key=len)

    def matches(self, name: str) -> bool:
        # Large mixtures of experts have many names: most are dismissed without the glob.
        if self._longest_piece not in name:
            return False
        return self._glob is None or self._glob.match(name) is not None


class Exclusions:
    """Names of modules that are not quantised.

    An entry is `re:` and a regular expression for the start of a name, a glob for the whole name,
    or any number of consecutive components of it, such as `lm_head` or `layers.0.self_attn`, each
    of which may be a regular expression.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._plain = {entry for entry in entries if _PLAIN_NAME.fullmatch(entry)}
        self._starts: list[re.Pattern[str]] = []
        self._inner: list[re.Pattern[str]] = []
        for entry in entries:
            if entry.startswith("re:"):
                self._starts.append(_compile(entry[3:], entry))
            elif entry not in self._plain:
                self._add_pattern(entry)
        self._contains = lru_cache(maxsize=None)(self._find)

    def __contains__(self, name: str) -> bool:
        return self._contains(name)

    def _add_pattern(self, entry: str) -> None:
        is_glob = "*" in entry or "?" in entry
        if is_glob:
            self._starts.append(re.compile(translate(entry)))
        try:
            self._inner.append(re.compile(rf"(?:^|(?<=\.))(?:{entry})(?:$|(?=\.)|(?<=\.))"))
        except re.error:
            if not is_glob:  # `*lm_head` is one
                raise ConfigError(f"quantization_config: exclude={entry!r} is no pattern") from None

    def _find(self, name: str) -> bool:
        pieces = name.split(".")
        spans = (
            ".".join(pieces[start:end])
            for start in range(len(pieces))
            for end in range(start + 1, len(pieces) + 1)
        )
        return (
            any(span in self._plain for span in spans)
            or any(pattern.match(name) for pattern in self._starts)
            or any(pattern.search(name) for pattern in self._inner)
        )


def _compile(expression: str, entry: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(f"quantization_config: exclude={entry!r}: {error}") from error


def _refuse_online_rotations(algorithms: object) -> None:
    """Rotations of activations would have to be computed; others are folded into the weights."""
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if not isinstance(algorithm, Mapping):
            continue
        for key in ("r3", "r4", "online_r1_rotation"):
            if algorithm.get(key):
                raise ConfigError(
                    f"quantization_config: algo_config of {algorithm.get('name')!r} with "
                    f"{key}={algorithm[key]!r} is not supported"
                )
