"""GGUF files whose blocks are kept: each matrix has the numbers of its type, none rounded.

Types of 2, 3 and 5 bits, and MXFP4, are codes of 6 bits here, IQ4_NL and IQ4_XS are of 8. A
converted file's tensors are those of `QuantWeights`: `weight` has codes, `weight_high` the upper
bits of `int6`, `weight_scale`, `weight_offset`, `weight_super_scale` and `weight_super_offset` the
rest. `quantization_config` has `types`, from GGUF's name of a type to the modules that are stored
so, and `dequantised`, from a reason to the number of matrices that are plain numbers instead.
Source of the types: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atom.config import ConfigError
from atom.model_ops.quant.base import IN, OUT, Axis, Header, LayerKind, QuantMethod, StoredTensor
from atom.model_ops.quant.names import read_names, read_object, same_for_all
from atom.model_ops.quant.weights import QuantWeights, WeightFormat

_SUPER = 256
TYPES: Mapping[str, WeightFormat] = {
    "Q8_0": WeightFormat("int8", 1, 32),
    "Q4_0": WeightFormat("int4", 1, 32),
    "Q4_1": WeightFormat("int4", 1, 32, has_offsets=True),
    "Q4_K": WeightFormat("int4", 1, 32, "int8", has_offsets=True, super_columns=_SUPER),
    "Q5_0": WeightFormat("int6", 1, 32),
    "Q5_1": WeightFormat("int6", 1, 32, has_offsets=True),
    "Q2_K": WeightFormat("int6", 1, 16, "int8", has_offsets=True, super_columns=_SUPER),
    "Q3_K": WeightFormat("int6", 1, 16, "int8", super_columns=_SUPER),
    "Q5_K": WeightFormat("int6", 1, 32, "int8", has_offsets=True, super_columns=_SUPER),
    "Q6_K": WeightFormat("int6", 1, 16, "int8", super_columns=_SUPER),
    "IQ4_NL": WeightFormat("int8", 1, 32),
    "IQ4_XS": WeightFormat("int8", 1, 32, "int8", super_columns=_SUPER),
    "MXFP4": WeightFormat("int6", 1, 32),
}
# Powers of two beyond float16.
_WIDE_SCALES = {"MXFP4"}


def stored_tensors(type_name: str) -> dict[str, StoredTensor]:
    """The tensors of a matrix, by name."""
    form = TYPES[type_name]
    plain = torch.bfloat16 if type_name in _WIDE_SCALES else torch.float16
    if form.codes == "int8":
        stored = {"weight": StoredTensor((OUT, IN), torch.int8)}
    else:
        stored = {"weight": StoredTensor((OUT, Axis("in", 2)), torch.uint8)}
    if form.codes == "int6":
        stored["weight_high"] = StoredTensor((OUT, Axis("in", 4)), torch.uint8)
    groups = (OUT, Axis("in", form.columns))
    names = ("scale", "offset") if form.has_offsets else ("scale",)
    for name in names:
        if not form.super_columns:
            stored[f"weight_{name}"] = StoredTensor(groups, plain, "numbers")
            continue
        stored[f"weight_{name}"] = StoredTensor(groups, torch.int8)
        supers = (OUT, Axis("in", form.super_columns))
        stored[f"weight_super_{name}"] = StoredTensor(supers, torch.float16, "numbers")
    return stored


class GgufMethod(QuantMethod):
    """A matrix of one of `TYPES`."""

    def __init__(self, type_name: str) -> None:
        self.format = TYPES[type_name]
        self.stored = stored_tensors(type_name)

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        codes = tensors["weight"]
        if "weight_high" in tensors:
            codes = torch.cat((codes, tensors["weight_high"]), dim=-1)
        return QuantWeights(
            self.format,
            codes,
            tensors["weight_scale"],
            offset=tensors.get("weight_offset"),
            super_scale=tensors.get("weight_super_scale"),
            super_offset=tensors.get("weight_super_offset"),
        )


class GgufConfig:
    """Attributes:
    types: GGUF's name of a type by module.
    dequantised: why matrices are plain numbers -> how many.
    """

    def __init__(self, types: Mapping[str, str], dequantised: Mapping[str, int]) -> None:
        self.types = types
        self.dequantised = dequantised
        self._methods = {name: GgufMethod(name) for name in set(types.values())}

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        found = same_for_all(prefix, parts, self.types.get)
        return None if found is None else self._methods[found]

    def splits(self, parts: Sequence[str]) -> bool:
        return len({self.types.get(part) for part in parts}) > 1

    def __str__(self) -> str:
        counts = Counter(self.types.values()).most_common()
        text = "GGUF " + ", ".join(f"{name} ({count} matrices)" for name, count in counts)
        if not self.dequantised:
            return text
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dequantised.items())
        return f"{text}; dequantised: {reasons}"


def config_of(types: Mapping[str, str], dequantised: Mapping[str, int]) -> dict[str, object]:
    """The `quantization_config` that `parse` reads."""
    modules: dict[str, list[str]] = {}
    for module, name in types.items():
        modules.setdefault(name, []).append(module)
    return {"quant_method": "gguf", "types": modules, "dequantised": dict(dequantised)}


def parse(config: Mapping[str, Any], _: Mapping[str, Header]) -> GgufConfig:
    """Raises:
    ConfigError: for a type that is not kept.
    """
    types: dict[str, str] = {}
    for name, modules in read_object("types", config.get("types")).items():
        if name not in TYPES:
            raise ConfigError(
                f"quantization_config: type {name} is not supported; supported: {', '.join(TYPES)}"
            )
        types |= dict.fromkeys(read_names(f"types[{name!r}]", modules), name)
    dequantised = read_object("dequantised", config.get("dequantised"))
    if not all(type(count) is int for count in dequantised.values()):
        raise ConfigError("quantization_config: dequantised holds other values than numbers")
    return GgufConfig(types, dequantised)
