"""The tensors of a layer's weights: created, cut for this rank, loaded and converted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from atom.model_ops.finite import check_finite, may_be_infinite
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.base import IN, OUT, Axis, QuantMethod, StoredTensor
from atom.model_ops.quant.weights import (
    QuantWeights,
    ScaleType,
    WeightFormat,
    dequantise,
    scale_values,
)
from atom.model_ops.weights import copy_codes, copy_weight

# Checks that the numbers that quantised weights stand for are finite in the model's dtype.

_PART_SIZE = 1 << 24
# Of a code, less the middle for int4 and int6.
_LARGEST_CODES = {"int4": 15, "int6": 63, "int8": 128, "fp4": 6, "fp8": 448}


def check_range(weights: QuantWeights, dtype: torch.dtype) -> None:
    """Refuse weights that are NaN or infinite as `dtype`.

    Reads the scales alone, unless codes as large as can be would not fit with the largest of them.

    Raises:
        ValueError: with the largest weight.
    """
    if weights.codes.is_meta or _bound(weights) <= torch.finfo(dtype).max:
        return
    if weights.codes.dim() == 2:
        _check_matrix(weights, dtype)
        return
    for expert in range(weights.codes.shape[0]):
        _check_matrix(weights.experts(expert, expert + 1), dtype)


def _bound(weights: QuantWeights) -> float:
    """At least the largest weight; NaN or infinity if a scale is."""
    bound: float = _LARGEST_CODES[weights.format.codes]
    if weights.zeros is not None:
        bound += _largest(weights.zeros)
    if weights.scale is not None:
        bound *= _largest(weights.scale, weights.format.scale_type)
    if weights.row_scale is not None:
        bound *= _largest(weights.row_scale)
    if weights.super_scale is not None:
        bound *= _largest(weights.super_scale)
    if weights.offset is not None:
        offset = _largest(weights.offset)
        bound += offset * (1 if weights.super_offset is None else _largest(weights.super_offset))
    return bound


def _largest(values: torch.Tensor, scale_type: ScaleType = "float") -> float:
    """The largest magnitude."""
    parts = torch.split(values.flatten(), _PART_SIZE)
    # Of the stored numbers, whose order is that of what they stand for.
    ends = torch.stack([end for part in parts for end in _ends(part)])
    largest: float = scale_values(ends, scale_type).abs().amax().item()
    return largest


def _ends(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest value; both NaN if one is."""
    if values.is_floating_point() and values.dtype.itemsize == 1:  # torch compares none of 8 bits
        values = values.to(torch.float16)
    smallest, largest = torch.aminmax(values)
    return smallest, largest


def _check_matrix(weights: QuantWeights, dtype: torch.dtype) -> None:
    values = dequantise(weights, dtype)
    if not may_be_infinite(values) or bool(values.isfinite().all()):
        return
    most = dequantise(weights, torch.float64).abs().amax().item()
    raise ValueError(f"weights up to {most:g} do not fit {str(dtype).removeprefix('torch.')}")


_NAN_EXPONENT = 255


@dataclass(frozen=True)
class Cut:
    """A range of a dimension: `size` of `total` from `start`."""

    start: int
    size: int
    total: int

    @classmethod
    def whole(cls, size: int) -> Cut:
        return cls(0, size, size)


@dataclass(frozen=True)
class Part:
    """This rank's part of one of the checkpoint's matrices; a layer stacks several.

    Attributes:
        rows, columns: of the checkpoint's matrix.
        offset: its first output in the layer.
        index: its number in the layer.
    """

    rows: Cut
    columns: Cut
    offset: int = 0
    index: int = 0


class MatrixStorage:
    """Parameters of `layer` for stacked matrices, or for those of all experts.

    A tensor `weight_packed` is parameter `<prefix>weight_packed`. Weights that are not quantised
    are one tensor `weight`.

    Args:
        parts: of one expert; all have the same columns.
        method: None for unquantised weights.
        has_bias: the layer loads `bias` itself.

    Attributes:
        is_split: whether the matrices are layers of their own instead, and there are no tensors.

    Raises:
        ValueError: when a part cuts through packed codes, or through a group of inputs.
    """

    is_split = False

    def __init__(
        self,
        layer: nn.Module,
        parts: Sequence[Part],
        method: QuantMethod | None,
        context: LayerContext,
        prefix: str = "",
        num_experts: int | None = None,
        has_bias: bool = False,
    ) -> None:
        self._layer = layer
        self._parts = tuple(parts)
        self._prefix = prefix
        self._experts = () if num_experts is None else (num_experts,)
        self._method = method
        self.device = context.device
        plain = {"weight": StoredTensor((OUT, IN), context.dtype, "numbers")}
        self.stored = dict(plain if method is None else method.stored)
        if has_bias:
            self.stored.pop("bias", None)
        self._dtype = context.dtype
        self._cuts_blocks = False
        # Tensors without values that were found to fit.
        self._fitting: set[tuple[object, ...]] = set()
        for name, stored in self.stored.items():
            self.stored[name] = self._fit(name, stored)
        for name, stored in self.stored.items():
            self._create(name, stored)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(part.rows.size for part in self._parts)

    @property
    def columns(self) -> int:
        return self._parts[0].columns.size

    @property
    def format(self) -> WeightFormat | None:
        """Of the converted weights; None if they are not quantised."""
        if self._method is None:
            return None
        form = self._method.format
        return replace(form, rows=1) if self._cuts_blocks else form

    def load(self, name: str, tensor: torch.Tensor, part: Part, expert: int | None = None) -> None:
        """Load one tensor of one of the checkpoint's matrices.

        Args:
            name: without the parameter's prefix.
            expert: None if there are no experts, or `tensor` has those of all in front.

        Raises:
            ValueError: when it does not fit.
        """
        if tensor.is_meta:
            # All experts alike: a checkpoint may have a hundred thousand of their tensors.
            kind = (name, tensor.shape, tensor.dtype, part.index, expert is None)
            if kind not in self._fitting:
                self._load_all(name, tensor, part, expert)
                self._fitting.add(kind)
        else:
            self._load_all(name, tensor, part, expert)

    def is_as_stored(self, name: str) -> bool:
        """Whether a parameter is the matrices' tensors of its name, one above the other and one
        expert behind the other, as they are, but for their dtype.
        """
        stored = self.stored[name]
        cuts = (cut for part in self._parts for cut in (part.rows, part.columns))
        return (
            (self._method is None or type(self._method).read is QuantMethod.read)
            and not (self._cuts_blocks or stored.is_derived or stored.is_optional)
            and stored.holds in ("codes", "numbers")
            and any(axis.of == "out" for axis in stored.axes[:1])
            and all(cut.size == cut.total for cut in cuts)
        )

    def unstacked(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What each matrix has of a tensor of all of them, one above the other.

        Raises:
            ValueError: when it has another number of rows, or its blocks or words are cut.
        """
        known = self.stored if self._method is None else self._method.stored
        stored = known.get(name, StoredTensor((OUT,), self._dtype))
        totals = [part.rows.total for part in self._parts]
        if stored.holds == "shape":
            columns = self._parts[0].columns.total
            if not tensor.is_meta and tensor.tolist() != [sum(totals), columns]:
                wanted = [sum(totals), columns]
                raise ValueError(
                    f"the checkpoint says shape {tensor.tolist()}, the model wants {wanted}"
                )
            return [torch.tensor([rows, columns], device=tensor.device) for rows in totals]
        dim = next((i for i, axis in enumerate(stored.axes) if axis.of == "out"), None)
        if dim is None:
            return [tensor] * len(totals)
        per = stored.axes[dim].per
        ends = list(itertools.accumulate(totals))
        if any(end % per for end in ends[:-1]):
            raise ValueError(f"its blocks of {per} rows lie in two of the matrices that it holds")
        sizes = [math.ceil(rows / per) for rows in totals]
        if tensor.dim() <= dim or tensor.shape[dim] != sum(sizes):
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants {sum(sizes)} "
                f"rows in dimension {dim}"
            )
        return list(torch.split_with_sizes(tensor, sizes, dim))

    def take(self) -> QuantWeights:
        """The converted weights; the parameters are deleted.

        Raises:
            ValueError: when the stored values are of no use, or too large for the model's dtype.
        """
        form = self.format
        assert self._method is not None
        assert form is not None
        tensors = {name: self._parameter(name) for name in self.stored}
        weights = self._method.convert(tensors, self.rows, self.columns)
        self.drop()
        weights = replace(weights, format=form)
        check_range(weights, self._dtype)
        return weights

    def drop(self) -> frozenset[str]:
        """Delete the parameters, whose values are not needed -> their names."""
        for name, stored in self.stored.items():
            if stored.holds == "zeros":
                setattr(self._layer, self._prefix + name, None)
            else:
                delattr(self._layer, self._prefix + name)
        return frozenset(self._prefix + name for name in self.stored)

    def describe(self) -> str:
        """All that the converted weights depend on besides the checkpoint's tensors."""
        method = type(self._method).__name__
        return f"{method} {self.format!r} {self._parts} {self._experts} {self._dtype} {self.stored}"

    def _load_all(self, name: str, tensor: torch.Tensor, part: Part, expert: int | None) -> None:
        if self._method is None:
            self._load(name, tensor, part, expert)
            return
        if self.stored[name].is_derived:
            raise ValueError("--quantization computes it, and the checkpoint has one already")
        if any(stored.is_derived for stored in self.stored.values()):
            tensor = self._shaped(tensor, (OUT, IN), part, expert).to(self.device)
        for stored_name, stored in self._method.read(name, tensor).items():
            if stored is not tensor and not tensor.is_meta:
                check_finite(tensor)  # what was made of it need not show
            self._load(stored_name, stored, part, expert)

    def _parameter(self, name: str) -> torch.Tensor:
        values: torch.Tensor = getattr(self._layer, self._prefix + name)
        return values.detach()

    def _fit(self, name: str, stored: StoredTensor) -> StoredTensor:
        """The tensor with scales per output, where blocks of outputs would be cut in two."""
        axes = list(stored.axes)
        for i, axis in enumerate(axes):
            if axis.of == "all" or axis.per == 1:
                continue
            if all(_is_aligned(part, axis) for part in self._parts):
                continue
            if axis.of == "in" or stored.holds == "codes":
                what = "outputs" if axis.of == "out" else "inputs"
                cuts = [_cut(part, axis) for part in self._parts]
                listed = ", ".join(f"{c.start}..{c.start + c.size} of {c.total}" for c in cuts)
                raise ValueError(
                    f"{name} is stored in groups of {axis.per} {what}, which this rank's "
                    f"{listed} would cut"
                )
            axes[i] = OUT
            self._cuts_blocks = True
        return replace(stored, axes=tuple(axes))

    def _create(self, name: str, stored: StoredTensor) -> None:
        shape = [self._size(axis) for axis in stored.axes]
        per_part = () if any(axis.of == "out" for axis in stored.axes) else (len(self._parts),)
        size = *self._experts, *per_part, *shape
        values = torch.empty(*size, dtype=stored.dtype, device=self.device)
        if stored.is_optional or stored.is_derived or stored.holds == "shape":
            if not values.is_meta:
                values.fill_(stored.fill)
            # A buffer, since a checkpoint need not fill it.
            self._layer.register_buffer(self._prefix + name, values)
        else:
            parameter = nn.Parameter(values, requires_grad=False)
            self._layer.register_parameter(self._prefix + name, parameter)

    def _size(self, axis: Axis) -> int:
        if axis.of == "all":
            return axis.per
        return math.ceil((sum(self.rows) if axis.of == "out" else self.columns) / axis.per)

    def _load(self, name: str, tensor: torch.Tensor, part: Part, expert: int | None) -> None:
        stored = self.stored[name]
        original = (stored if self._method is None else self._method.stored[name]).axes
        tensor = self._shaped(tensor, original, part, expert)
        if stored.holds == "zeros":
            _check_zeros(tensor)
            return
        if stored.holds == "shape":
            _check_shape(tensor, part)
            return
        target = self._parameter(name)
        if expert is not None:
            target = target[expert]
        if all(axis.of != "out" for axis in original):
            target = target.select(-1 - len(original), part.index)
        for i, (axis, was) in enumerate(zip(stored.axes, original, strict=True)):
            dim = i - len(original)
            if axis.of == "all":
                continue
            if axis != was:
                total = part.rows.total
                tensor = tensor.repeat_interleave(was.per, dim=dim).narrow(dim, 0, total)
            cut = _cut(part, axis)
            size = math.ceil(cut.size / axis.per)
            tensor = tensor.narrow(dim, cut.start // axis.per, size)
            if axis.of == "out":
                target = target.narrow(dim, part.offset // axis.per, size)
        _copy(target, tensor, stored)

    def _shaped(
        self, tensor: torch.Tensor, axes: Sequence[Axis], part: Part, expert: int | None
    ) -> torch.Tensor:
        """The tensor without dimensions of size 1 that only some writers add or leave out."""
        wanted = tuple(
            axis.per if axis.of == "all" else math.ceil(_cut(part, axis).total / axis.per)
            for axis in axes
        )
        if expert is None:
            wanted = (*self._experts, *wanted)
        if tuple(tensor.shape) == wanted:
            return tensor
        if [n for n in tensor.shape if n != 1] != [n for n in wanted if n != 1]:
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants {list(wanted)}"
            )
        return tensor.reshape(wanted)


class SplitStorage(MatrixStorage):
    """Of a layer whose matrices are layers of their own."""

    is_split = True

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._parts = tuple(parts)
        self._method = None
        self.device = device
        self.stored = {}


def _cut(part: Part, axis: Axis) -> Cut:
    return part.rows if axis.of == "out" else part.columns


def _is_aligned(part: Part, axis: Axis) -> bool:
    """Whether a part consists of whole blocks; the last of its matrix may be smaller."""
    cut = _cut(part, axis)
    ends = cut.start + cut.size
    starts_well = cut.start % axis.per == 0
    if axis.of == "out":
        starts_well = starts_well and part.offset % axis.per == 0
    return starts_well and (ends % axis.per == 0 or ends == cut.total)


def _copy(target: torch.Tensor, tensor: torch.Tensor, stored: StoredTensor) -> None:
    if stored.holds == "numbers":
        copy_weight(target, tensor)
        return
    copy_codes(target, tensor)
    if stored.holds != "exponents" or target.is_meta:
        return
    if count := int((tensor.view(torch.uint8) == _NAN_EXPONENT).sum()):
        raise ValueError(f"{count} of {tensor.numel()} scales are NaN")


def _check_zeros(tensor: torch.Tensor) -> None:
    if not tensor.is_meta and (count := int(tensor.count_nonzero())):
        raise ValueError(f"{count} of {tensor.numel()} values are not 0, and the model has none")


def _check_shape(tensor: torch.Tensor, part: Part) -> None:
    wanted = [part.rows.total, part.columns.total]
    if not tensor.is_meta and tensor.tolist() != wanted:
        raise ValueError(f"the checkpoint says shape {tensor.tolist()}, the model wants {wanted}")
