"""`quant_method: gptq`: weights of 4 or 8 bits of AutoGPTQ and GPTQModel.

Source: the `QuantLinear` of AutoGPTQ, and GPTQModel's `dynamic` rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atom.config import ConfigError
from atom.model_ops.quant.base import Header, LayerKind, QuantConfig, QuantMethod
from atom.model_ops.quant.formats.gptq_method import GptqMethod, Scheme
from atom.model_ops.quant.names import find_header, read_flag, read_object, same_for_all
from atom.model_ops.quant.patterns import PatternReader
from atom.model_ops.quant.words import Groups, read_group_size, read_layout

# Keys that change what the stored numbers mean.
_REFUSED = ("is_marlin_format", "rotation", "adapter", "modules_in_block_to_quantize")


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    for key in _REFUSED:
        if config.get(key):
            raise ConfigError(f"quantization_config: {key}={config[key]!r} is not supported")
    stored_as = read_layout(config, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    read_flag(config, "pack_dtype", ("int32",), "int32")
    base = _override(Scheme(4, Groups(None), True, False, stored_as == "gptq"), config)
    if "bits" not in config or "group_size" not in config:
        raise ConfigError("quantization_config: GPTQ needs bits and group_size")
    reader = PatternReader("dynamic")
    rules = tuple(
        _read_rule(reader, rule, overrides, base)
        for rule, overrides in read_object("dynamic", config.get("dynamic")).items()
    )
    return GptqConfig(base, rules, bool(config.get("lm_head")), headers)


@dataclass(frozen=True)
class GptqConfig:
    """Attributes:
    base: of all layers that no rule matches.
    rules: patterns for the start of a name and what they change; None skips the layer.
    """

    base: Scheme
    rules: tuple[tuple[re.Pattern[str], Scheme | None], ...]
    has_head: bool
    headers: Mapping[str, Header]

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind == "embedding" or (kind == "head" and not self.has_head):
            return None
        scheme = same_for_all(prefix, parts, self._scheme_of)
        if scheme is None:
            return None
        return GptqMethod(scheme, find_header(self.headers, prefix, parts, "scales"))

    def _scheme_of(self, name: str) -> Scheme | None:
        for pattern, scheme in self.rules:
            if pattern.match(name):
                return scheme
        return self.base


def _read_rule(
    reader: PatternReader, rule: str, overrides: object, base: Scheme
) -> tuple[re.Pattern[str], Scheme | None]:
    """`-:` skips the modules that match, `+:` or no sign changes them."""
    pattern = reader.expression(rule.removeprefix("-:").removeprefix("+:"), rule)
    changes = read_object(f"dynamic[{rule!r}]", overrides)
    return pattern, None if rule.startswith("-:") else _override(base, changes)


def _override(scheme: Scheme, config: Mapping[str, Any]) -> Scheme:
    if "bits" in config:
        bits = config["bits"]
        if bits not in (4, 8):
            raise ConfigError(
                f"quantization_config: GPTQ with bits={bits!r} is not supported, only 4 and 8"
            )
        scheme = replace(scheme, bits=bits)
    if "group_size" in config:
        scheme = replace(scheme, groups=Groups(read_group_size(config["group_size"])))
    return replace(
        scheme,
        symmetric=bool(config.get("sym", scheme.symmetric)),
        has_order=bool(config.get("desc_act", scheme.has_order)),
    )
