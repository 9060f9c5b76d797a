"""NVIDIA ModelOpt's formats: `quant_method: modelopt`, or a file `hf_quant_config.json`.

Source: ModelOpt's unified Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atom.config import ConfigError
from atom.model_ops.quant.base import (
    Header,
    LayerKind,
    QuantConfig,
    QuantMethod,
    UnquantizedConfig,
)
from atom.model_ops.quant.names import (
    find_header,
    modules_above,
    read_flag,
    read_names,
    read_object,
    same_for_all,
    spans,
)
from atom.model_ops.quant.patterns import Glob, PatternReader
from atom.model_ops.quant.scaled import ScaledMethod, ScaleNames
from atom.model_ops.quant.scales import scale_dtype
from atom.model_ops.quant.weights import Activations, WeightFormat


class _Algorithm(NamedTuple):
    form: WeightFormat
    names: ScaleNames = ScaleNames()
    is_per_output: bool = False


_TWO_SCALES = ScaleNames(factor="weight_scale_2")
# "WO": weights only.
_BLOCKS = _Algorithm(WeightFormat("fp8", 128, 128))
_ALGORITHMS = {
    "FP8": _Algorithm(
        WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8", is_static=True))
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algorithm(
        WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8")),
        is_per_output=True,
    ),
    "FP8_PB_WO": _BLOCKS,
    "FP8_BLOCK_SCALES": _BLOCKS,
    "NVFP4": _Algorithm(
        WeightFormat("fp4", 1, 16, "e4m3", False, True, Activations("fp4", 16, "e4m3")), _TWO_SCALES
    ),
    "W4A16_NVFP4": _Algorithm(WeightFormat("fp4", 1, 16, "e4m3", False, True), _TWO_SCALES),
    "MXFP8": _Algorithm(
        WeightFormat("fp8", 1, 32, "e8m0", activations=Activations("fp8", 32, "e8m0"))
    ),
}
_MIXED = "MIXED_PRECISION"


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    if isinstance(inner := config.get("quantization"), Mapping):
        config = inner
    cache = _check_cache(config)
    stated = config.get("quant_algo")
    if stated is None and cache:
        return UnquantizedConfig()
    for name in headers:
        if name.endswith(".pre_quant_scale"):
            raise ConfigError(f"quantization_config: {name} (AWQ) scales inputs: not supported")
    layers: dict[str, str] = {}
    if isinstance(stated, str) and stated.upper() == _MIXED:
        stated, layers = None, _layers(config.get("quantized_layers"))
    else:
        stated = _algorithm("quantization_config", config)
    return ModelOptConfig(stated, layers, _exclusions(config), headers)


@dataclass(frozen=True)
class Exclusions:
    """Names, and globs, that fit some components of a module's name that follow each other.

    So `lm_head` fits `language_model.lm_head`, `model.layers.*.self_attn*` all projections, and
    `layers.1` not `layers.10`.
    """

    names: frozenset[str]
    globs: tuple[Glob, ...]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            any(span in self.names for span in spans(name))
            or any(glob.fits(name) for glob in self.globs)
        )


@dataclass(frozen=True)
class ModelOptConfig:
    """Attributes:
    algorithm: of all modules; None if they have their own.
    layers: the algorithm of a module and all below it.
    excluded: modules that are not quantised.
    """

    algorithm: str | None
    layers: Mapping[str, str]
    excluded: Exclusions
    headers: Mapping[str, Header]

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind == "embedding":
            return None
        found = same_for_all(prefix, parts, self._algorithm) or self.layers.get(prefix)
        header = find_header(self.headers, prefix, parts, "weight_scale")
        if found is None or prefix in self.excluded:
            return None
        if kind == "head" and header is None:  # hardly ever quantised, and not always excluded
            return None
        form, names, is_per_output = _ALGORITHMS[found]
        return ScaledMethod(form, names, is_per_output, scale_dtype(header))

    def _algorithm(self, name: str) -> str | None:
        if name in self.excluded:
            return None
        if self.algorithm is not None:
            return self.algorithm
        nearest_first = reversed(tuple(modules_above(name)))
        return next((self.layers[above] for above in nearest_first if above in self.layers), None)


def _algorithm(where: str, config: Mapping[str, Any]) -> str:
    stated = config.get("quant_algo")
    name = stated.upper() if isinstance(stated, str) else ""
    if name not in _ALGORITHMS:
        raise ConfigError(
            f"{where}: quant_algo={stated!r} is not supported; supported: "
            f"{', '.join(_ALGORITHMS)}, {_MIXED}"
        )
    form, size = _ALGORITHMS[name].form, config.get("group_size")
    if form.columns and size not in (None, form.columns):
        raise ConfigError(
            f"{where}: group_size={size!r} of {name} is not supported, only {form.columns}"
        )
    return name


def _layers(stated: object) -> dict[str, str]:
    if not (layers := read_object("quantized_layers", stated)):
        raise ConfigError(f"quantization_config: quantized_layers={stated!r} of {_MIXED}")
    where = "quantization_config: quantized_layers"
    return {
        name: _algorithm(f"{where}.{name}", layer if isinstance(layer, Mapping) else {})
        for name, layer in layers.items()
    }


def _check_cache(config: Mapping[str, Any]) -> bool:
    """Whether the cache has scales; `--kv-cache-dtype` decides whether they are used."""
    algorithm = read_flag(config, "kv_cache_quant_algo", ("FP8",), "")
    scheme = config.get("kv_cache_scheme")
    kind = (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, Mapping) else None
    if scheme is not None and kind != (8, "float"):
        raise ConfigError(f"quantization_config: kv_cache_scheme={scheme!r} is not supported")
    return bool(algorithm) or scheme is not None


def _exclusions(config: Mapping[str, Any]) -> Exclusions:
    entries = [
        entry for key in ("ignore", "exclude_modules") for entry in read_names(key, config.get(key))
    ]
    globs = {entry for entry in entries if "*" in entry or "?" in entry}
    reader = PatternReader("exclude_modules")
    return Exclusions(
        frozenset(entries) - globs,
        tuple(
            reader.glob(entry, entry, f"{entry}.*", f"*.{entry}", f"*.{entry}.*")
            for entry in sorted(globs)
        ),
    )
