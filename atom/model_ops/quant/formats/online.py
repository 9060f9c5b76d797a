"""`--quantization`: floating-point weights that are quantised when they are loaded.

Only weights are quantised, so that devices differ in speed and not in accuracy. Scales are computed
of the checkpoint's matrices, before they are cut for a rank, so any number of ranks computes the
same product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from atom.model_ops.quant.base import IN, OUT, Axis, LayerKind, QuantMethod, StoredTensor
from atom.model_ops.quant.codes import e8m0_scales, round_to_fp4
from atom.model_ops.quant.names import names_module, same_for_all
from atom.model_ops.quant.weights import (
    INT4_ZERO,
    QuantWeights,
    WeightFormat,
    pack_nibbles,
    scale_values,
)

_GROUP = 32
_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SMALLEST_SCALE = 1e-12
# Weights that are quantised at a time, in float32.
_PART_WEIGHTS = 1 << 20
_DUMMY_SCALE = 0.02
_DUMMY_EXPONENT = 121  # 2^-6

# float32 [rows, in] -> the stored tensors.
Quantise = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


class OnlineMethod(QuantMethod):
    """`weight` [out, in] in floating point is stored as codes, with scales and zero points."""

    def __init__(
        self, form: WeightFormat, stored: Mapping[str, StoredTensor], quantise: Quantise
    ) -> None:
        self.format = form
        self.stored = stored
        self._quantise = quantise

    def read(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if tensor.dtype not in _NUMBERS:
            raise ValueError(f"--quantization needs floating-point weights, not {tensor.dtype}")
        *outer, columns = tensor.shape
        result = {
            of: tensor.new_empty(
                *outer,
                *(math.ceil(columns / axis.per) for axis in stored.axes[1:]),
                dtype=stored.dtype,
            )
            for of, stored in self.stored.items()
        }
        if tensor.is_meta:
            return result
        rows = tensor.reshape(-1, columns)
        step = max(1, _PART_WEIGHTS // columns)
        for start in range(0, rows.shape[0], step):
            part = self._quantise(rows[start : start + step].float())
            for of, values in result.items():
                values.view(-1, *part[of].shape[1:])[start : start + step] = part[of]
        return result

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        scale = tensors["weight_scale"]
        if self.format.has_row_scale:
            return QuantWeights(self.format, tensors["weight"], row_scale=scale)
        zeros = tensors.get("weight_zeros")
        return QuantWeights(self.format, tensors["weight"], scale, zeros)


def _quantise_fp8(rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
    scale = (_magnitudes(rows) / 448).clamp(min=_SMALLEST_SCALE)
    return {"weight": (rows / scale[:, None]).to(torch.float8_e4m3fn), "weight_scale": scale}


def _quantise_int8(rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
    scale = (_magnitudes(rows) / 127).clamp(min=_SMALLEST_SCALE)
    return {"weight": (rows / scale[:, None]).round().to(torch.int8), "weight_scale": scale}


def _quantise_mxfp4(rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The scale is the least for which the largest number is nearer to 6 than to 8."""
    groups = _groups(rows)
    exponents = e8m0_scales(_magnitudes(groups), "fp4")
    codes = round_to_fp4(groups / scale_values(exponents, "e8m0")[..., None])
    return {"weight": _packed(codes, rows), "weight_scale": exponents}


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row."""
    return values.abs().amax(dim=-1)


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """[rows, in] -> [rows, groups, 32]; the last group is filled with zeros."""
    size = rows.shape[-1]
    if size % 2:
        raise ValueError(f"{size} inputs cannot be packed two to a byte")
    return F.pad(rows, (0, -size % _GROUP)).view(rows.shape[0], -1, _GROUP)


def _packed(codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return pack_nibbles(codes.flatten(-2)[:, : rows.shape[-1]])


def _quantise_int4(rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """16 steps from the least to the largest number of a group, zero included."""
    groups = _groups(rows)
    low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=_SMALLEST_SCALE).to(torch.bfloat16)
    zeros = (-low / scale.float()).to(torch.float16)
    codes = (groups / scale.float()[..., None] + zeros.float()[..., None]).round().clamp(0, 15)
    return {
        "weight": _packed(codes.to(torch.uint8), rows),
        "weight_scale": scale,
        "weight_zeros": zeros,
    }


def _per_channel(codes: torch.dtype) -> Mapping[str, StoredTensor]:
    scale = StoredTensor((OUT,), torch.float32, "numbers", fill=_DUMMY_SCALE, is_derived=True)
    return {"weight": StoredTensor((OUT, IN), codes), "weight_scale": scale}


def _per_group(**others: StoredTensor) -> Mapping[str, StoredTensor]:
    return {"weight": StoredTensor((OUT, Axis("in", 2)), torch.uint8), **others}


_GROUPS = (OUT, Axis("in", _GROUP))
METHODS: Mapping[str, QuantMethod] = {
    "fp8": OnlineMethod(
        WeightFormat("fp8", has_row_scale=True), _per_channel(torch.float8_e4m3fn), _quantise_fp8
    ),
    "int8": OnlineMethod(
        WeightFormat("int8", has_row_scale=True), _per_channel(torch.int8), _quantise_int8
    ),
    "int4": OnlineMethod(
        WeightFormat("int4", 1, _GROUP, has_zeros=True),
        _per_group(
            weight_scale=StoredTensor(
                _GROUPS, torch.bfloat16, "numbers", fill=_DUMMY_SCALE, is_derived=True
            ),
            weight_zeros=StoredTensor(
                _GROUPS, torch.float16, "numbers", fill=INT4_ZERO, is_derived=True
            ),
        ),
        _quantise_int4,
    ),
    "mxfp4": OnlineMethod(
        WeightFormat("fp4", 1, _GROUP, "e8m0"),
        _per_group(
            weight_scale=StoredTensor(
                _GROUPS, torch.uint8, "exponents", fill=_DUMMY_EXPONENT, is_derived=True
            )
        ),
        _quantise_mxfp4,
    ),
}


@dataclass(frozen=True)
class OnlineConfig:
    """Every linear layer and expert is quantised, but those that `ignored` names.

    Routers never are, nor projections from latents, which attention reads as numbers.

    Attributes:
        name: one of `METHODS`.
        ignored: patterns of `names_module`.
        with_vocabulary: embedding and head are quantised, too, to `int8` whatever `name` is.
    """

    name: str
    ignored: tuple[str, ...] = ()
    with_vocabulary: bool = False

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind in ("head", "embedding"):
            is_quantised = self.with_vocabulary and self._name_for(prefix) is not None
            return METHODS["int8"] if is_quantised else None
        if prefix.endswith(".kv_b_proj"):
            return None
        found = same_for_all(prefix, parts, self._name_for)
        return None if found is None else METHODS[found]

    def _name_for(self, module: str) -> str | None:
        is_ignored = any(names_module(pattern, module) for pattern in self.ignored)
        return None if is_ignored else self.name
