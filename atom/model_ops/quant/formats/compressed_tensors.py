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
    IN,
    OUT,
    Axis,
    Header,
    LayerKind,
    QuantConfig,
    QuantMethod,
    StoredTensor,
    UnquantizedConfig,
)
from atom.model_ops.quant.formats.compressed_scheme import Scheme, read_scheme
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
from atom.model_ops.quant.weights import (
    Activations,
    Codes,
    QuantWeights,
    ScaleType,
    WeightFormat,
    unpack_nibbles,
)
from atom.model_ops.quant.words import Groups, as_bytes, signed, take_columns

# compressed-tensors' `pack-quantized`: integers of 4 or 8 bits in words of 32.
#
# Source: the package `compressed-tensors`, `pack_to_int32`.

# Zero points need groups; those of a whole row are repeated.
_WHOLE_ROW = Groups(None)
_SHAPE = StoredTensor((Axis("all", 2),), torch.int64, "shape")


class PackedIntegers(QuantMethod):
    """`weight_packed` int32 [out, in * bits / 32], element i from bit i * bits on; stored with an
    offset of 2^(bits - 1). `weight_zero_point` is packed so along the outputs.

    Inputs that `weight_g_idx` reorders cannot be split over ranks: their groups would be cut.

    Args:
        group: inputs per scale; 0 for one scale per output.
        dtype: of the scales.
        num_groups: of the whole matrix, if `weight_g_idx` names the group of each input.
    """

    def __init__(
        self,
        bits: int,
        group: int,
        has_zeros: bool,
        activations: Activations | None,
        dtype: torch.dtype,
        num_groups: int | None = None,
    ) -> None:
        self._bits = bits
        self._group = group
        self._num_groups = num_groups
        codes: Codes = "int4" if bits == 4 else "int8"
        columns = group or (_WHOLE_ROW.columns if has_zeros else 0)
        self.format = WeightFormat(
            codes,
            1 if columns else 0,
            columns,
            has_zeros=has_zeros,
            has_row_scale=not columns,
            activations=activations,
        )
        groups = () if not group else (Axis("in", group),)
        if num_groups is not None:
            groups = (Axis("all", num_groups),)
        words = 32 // bits
        stored = {
            "weight_packed": StoredTensor((OUT, Axis("in", words)), torch.int32),
            "weight_scale": StoredTensor(
                (OUT, *groups), dtype if columns else torch.float32, "numbers"
            ),
            "weight_shape": _SHAPE,
        }
        if has_zeros:
            stored["weight_zero_point"] = StoredTensor((Axis("out", words), *groups), torch.int32)
        if num_groups is not None:
            stored["weight_g_idx"] = StoredTensor((IN,), torch.int32)
        self.stored = stored

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        if columns % 2:
            raise ValueError(f"weight_packed has {columns} inputs; an even number is supported")
        codes, scale = self._codes(tensors["weight_packed"], columns), tensors["weight_scale"]
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = self._zeros(zeros, sum(rows))
        if not self.format.columns:
            return QuantWeights(self.format, codes, row_scale=scale)
        if not self._group:
            assert zeros is not None
            scale = _WHOLE_ROW.spread(scale[..., None], columns)
            zeros = _WHOLE_ROW.spread(zeros, columns)
        order = None
        if self._num_groups is not None:
            order, groups_of = self._order(tensors["weight_g_idx"], self._num_groups)
            if order is not None:
                codes = take_columns(codes, order, self._bits)
            scale = scale[..., groups_of]
            zeros = None if zeros is None else zeros[..., groups_of]
        return QuantWeights(self.format, codes, scale, zeros, column_order=order)

    def _codes(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        """int32 [..., out, words] -> uint8 [..., out, in / 2] or int8 [..., out, in]."""
        values = packed.contiguous().view(torch.uint8)  # little-endian
        if self._bits == 4:
            return values[..., : columns // 2].contiguous()
        return signed(values[..., :columns])

    def _zeros(self, packed: torch.Tensor, out: int) -> torch.Tensor:
        """int32 [..., words, groups] -> uint8 or int8 [..., out, groups]."""
        if not self._group:
            packed = packed[..., None]
        values = as_bytes(packed.mT)
        if self._bits == 4:
            values = unpack_nibbles(values)
        values = values[..., :out].mT.contiguous()
        return values if self._bits == 4 else signed(values)

    def _order(
        self, index: torch.Tensor, num_groups: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`weight_g_idx` [matrices, in] -> inputs sorted by group, None if they are, and the
        number of each group.
        """
        if bool((index != index[:1]).any()):
            raise ValueError("weight_g_idx differs between matrices that are one product")
        index = index[0].long()
        if bool(((index < 0) | (index >= num_groups)).any()):
            raise ValueError(
                f"weight_g_idx has groups {int(index.min())} to {int(index.max())} of {num_groups}"
            )
        ordered, order = index.sort(stable=True)
        firsts = ordered[:: self._group]
        if not torch.equal(ordered, firsts.repeat_interleave(self._group)[: index.shape[0]]):
            raise ValueError(
                f"weight_g_idx does not put {self._group} of this rank's inputs in each group; "
                f"inputs that it reorders cannot be split over ranks"
            )
        return None if torch.equal(index, ordered) else order, firsts


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
