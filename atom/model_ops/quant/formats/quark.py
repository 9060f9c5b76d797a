"""`quant_method: quark`: checkpoints of AMD Quark. This file says which layer is stored how.

Source: AMD Quark's exporter and AMD's published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from atom.config import ConfigError
from atom.model_ops.quant.base import Header, LayerKind, QuantConfig, QuantMethod
from atom.model_ops.quant.formats.quark_methods import create_method
from atom.model_ops.quant.formats.quark_specs import LayerSpecs, read_layer
from atom.model_ops.quant.names import read_flag, read_names, read_object, same_for_all, spans
from atom.model_ops.quant.patterns import Glob, PatternReader

_PLAIN_NAME = re.compile(r"[\w.-]*")
# What a glob has not: other operators, and `.*` at the start of a component.
_EXPRESSION = re.compile(r"[\\()|^$+{}]|(?:^|\.)\.\*")
_CACHED = re.compile(r"[kv]_proj")


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    if config.get("softmax_quant_spec"):
        raise ConfigError("quantization_config: softmax_quant_spec is not supported")
    _refuse_online_rotations(config.get("algo_config"))
    export = read_object("export", config.get("export"))
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
        self._by_name = _read_layers(config.get("layer_quant_config"))
        by_type = read_object("layer_type_quant_config", config.get("layer_type_quant_config"))
        self._by_type = [
            read_layer(layer, f"layer_type_quant_config[{kind!r}]")
            for kind, layer in by_type.items()
            if re.search(r"\bLinear\b", kind)
        ]
        self._exclude = Exclusions(read_names("exclude", config.get("exclude")))
        self._find = lru_cache(maxsize=None)(self._specs_of)

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind == "embedding" or prefix in self._exclude:
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
        if (listed := self._by_name.find(name)) is not None:
            return listed.specs
        return self._by_type[0] if self._by_type else self._global


class Listed(NamedTuple):
    """An entry of `layer_quant_config`; the first has place 0."""

    place: int
    specs: LayerSpecs | None


@dataclass(frozen=True)
class LayerList:
    """The first entry that fits a name counts.

    Attributes:
        names: any number of consecutive components of the name.
        globs: for the whole name; a word without dots may be anywhere in it.
    """

    names: Mapping[str, Listed]
    globs: Sequence[tuple[Glob, Listed]]

    def find(self, name: str) -> Listed | None:
        fitting = []
        if self.names:
            fitting = [self.names[span] for span in spans(name) if span in self.names]
        fitting += [listed for glob, listed in self.globs if glob.fits(name)]
        return min(fitting, key=lambda listed: listed.place, default=None)


def _read_layers(stated: object) -> LayerList:
    reader = PatternReader("layer_quant_config")
    names: dict[str, Listed] = {}
    globs: list[tuple[Glob, Listed]] = []
    for place, (text, layer) in enumerate(read_object("layer_quant_config", stated).items()):
        where = f"layer_quant_config[{text!r}]"
        listed = Listed(place, read_layer(layer, where, _CACHED.search(text) is not None))
        if "*" in text:
            globs.append((reader.glob(text), listed))
        elif "." in text:
            names[text] = listed
        else:
            globs.append((reader.glob(text, f"*{text}*"), listed))
    return LayerList(names, globs)


class Exclusions:
    """Names of modules that are not quantised.

    An entry is `re:` and a regular expression for the start of a name, or any number of consecutive
    components of it, such as `lm_head` or `layers.0.self_attn`, which may be a glob or a regular
    expression. A glob that starts with a wildcard is for the whole name.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._plain = {entry for entry in entries if _PLAIN_NAME.fullmatch(entry)}
        self._globs: list[Glob] = []
        self._starts: list[re.Pattern[str]] = []
        self._inner: list[re.Pattern[str]] = []
        reader = PatternReader("exclude")
        for entry in dict.fromkeys(entries):
            if entry.startswith("re:"):
                self._starts.append(reader.expression(entry[3:], entry))
            elif entry not in self._plain:
                self._add_pattern(entry, reader)
        self._contains = lru_cache(maxsize=None)(self._find)

    def __contains__(self, name: str) -> bool:
        return self._contains(name)

    def _add_pattern(self, entry: str, reader: PatternReader) -> None:
        is_glob = "*" in entry or "?" in entry
        if is_glob and not _EXPRESSION.search(entry):
            below = () if entry[0] in "*?" else (f"{entry}.*", f"*.{entry}", f"*.{entry}.*")
            self._globs.append(reader.glob(entry, entry, *below))
            return
        text = rf"(?:^|(?<=\.))(?:{entry})(?:$|(?=\.)|(?<=\.))"
        self._inner.append(reader.expression(text, entry))

    def _find(self, name: str) -> bool:
        return (
            (bool(self._plain) and any(span in self._plain for span in spans(name)))
            or any(glob.fits(name) for glob in self._globs)
            or any(pattern.match(name) for pattern in self._starts)
            or any(pattern.search(name) for pattern in self._inner)
        )


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
