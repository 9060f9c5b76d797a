"""compressed-tensors' `pack-quantized`: integers of 4 or 8 bits in words of 32.

Source: the package `compressed-tensors`, `pack_to_int32`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from atom.model_ops.quant.base import IN, OUT, Axis, QuantMethod, StoredTensor
from atom.model_ops.quant.weights import (
    Activations,
    Codes,
    QuantWeights,
    WeightFormat,
    unpack_nibbles,
)
from atom.model_ops.quant.words import Groups, as_bytes, signed, take_columns

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
