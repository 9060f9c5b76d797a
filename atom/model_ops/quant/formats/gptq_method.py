"""How GPTQ stores the weights of a layer.

Source: the `QuantLinear` of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atom.model_ops.quant.base import IN, OUT, Axis, Header, QuantMethod, StoredTensor
from atom.model_ops.quant.scales import scale_dtype
from atom.model_ops.quant.weights import QuantWeights, WeightFormat, unpack_nibbles
from atom.model_ops.quant.words import Groups, as_bytes, signed, take_columns

_WORD_BITS = 32


@dataclass(frozen=True)
class Scheme:
    """Attributes:
    symmetric: all zero points stand for the middle code.
    has_order: inputs are grouped in another order than their own (`desc_act`).
    zeros_less_one: zero points are stored less one (`checkpoint_format: gptq`).
    """

    bits: int
    groups: Groups
    symmetric: bool
    has_order: bool
    zeros_less_one: bool

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, group_size {self.groups.size or -1}, {kind}"

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


class GptqMethod(QuantMethod):
    """`qweight` int32 [in / n, out], `qzeros` int32 [in / group, out / n] with n codes to a word,
    `scales` [in / group, out], `g_idx` int32 or int64 [in]: the group of each input.

    A stored zero point of 15 is 16 if zero points are stored less one; for 8 bits, 255 is refused.
    """

    def __init__(self, scheme: Scheme, scale: Header | None) -> None:
        self._scheme = scheme
        groups, codes = scheme.groups, _WORD_BITS // scheme.bits
        self.format = WeightFormat(
            "int4" if scheme.bits == 4 else "int8",
            1,
            groups.columns,
            has_zeros=not scheme.symmetric,
        )
        middles = scheme.middle - scheme.zeros_less_one
        self.stored = {
            "qweight": StoredTensor((Axis("in", codes), OUT), torch.int32),
            "qzeros": StoredTensor(
                (groups.axis, Axis("out", codes)),
                torch.int32,
                is_optional=scheme.symmetric,
                fill=int.from_bytes(
                    (middles * (0x11 if scheme.bits == 4 else 1)).to_bytes(1, "little") * 4,
                    "little",
                    signed=True,
                ),
            ),
            "scales": StoredTensor((groups.axis, OUT), scale_dtype(scale), "numbers"),
            "g_idx": StoredTensor((IN,), torch.int32, is_optional=not scheme.has_order),
            # Of models without biases; older tools stored it nevertheless.
            "bias": StoredTensor((OUT,), torch.float32, "zeros", is_optional=True),
        }

    def read(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """`g_idx` less the groups of inputs in their own order, which survives cuts for ranks."""
        size = self._scheme.groups.size
        if name == "g_idx" and tensor.dtype is torch.int64:
            if not tensor.is_meta and bool(((tensor < 0) | (tensor >= tensor.numel())).any()):
                raise ValueError(f"groups {int(tensor.min())} to {int(tensor.max())} of inputs")
            tensor = tensor.to(torch.int32)
        if name == "g_idx" and size is not None:
            inputs = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            tensor = tensor - inputs // size
        return {name: tensor}

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        scheme, groups = self._scheme, self._scheme.groups
        # int32 words are little-endian: their bytes are codes, or pairs of them.
        codes = as_bytes(tensors["qweight"].mT)
        order = self._order(tensors["g_idx"], columns)
        if order is not None:
            codes = take_columns(codes, order, scheme.bits)
        zeros = None
        stored_zeros = self._zeros(tensors["qzeros"])
        if not scheme.symmetric:
            zeros = groups.spread(stored_zeros.to(codes.dtype), columns)
        elif bool((stored_zeros != scheme.middle).any()):
            raise ValueError(
                f"zero points are {int(stored_zeros.min())} to {int(stored_zeros.max())}, and the "
                f"weights are symmetric (sym), which makes them {scheme.middle}"
            )
        if scheme.bits == 8:
            codes = signed(codes)
            zeros = None if zeros is None else signed(zeros)
        scale = groups.spread(tensors["scales"].mT, columns)
        return QuantWeights(self.format, codes, scale, zeros, column_order=order)

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """[..., groups, words] -> int16 [..., out, groups]."""
        zeros = as_bytes(words)
        if self._scheme.bits == 4:
            zeros = unpack_nibbles(zeros)
        zeros = zeros.to(torch.int16).mT + int(self._scheme.zeros_less_one)
        if self._scheme.bits == 8 and bool((zeros > 255).any()):
            raise ValueError("a zero point of 8 bits is stored as 255, which stands for 256")
        return zeros

    def _order(self, shifts: torch.Tensor, columns: int) -> torch.Tensor | None:
        """The inputs sorted by group, [in]; None if they are.

        Args:
            shifts: [..., stacked matrices, in], from `read`.
        """
        if not shifts.any():
            return None
        every = shifts.flatten(0, -2)
        if bool((every != every[0]).any()):
            raise ValueError(
                f"the {len(every)} matrices of one product group their inputs in different orders "
                f"(g_idx), which is not supported"
            )
        size = self._scheme.groups.size or columns
        inputs = torch.arange(columns, device=shifts.device)
        group = every[0] + inputs // size
        own = (inputs // size).bincount()
        if bool((group < 0).any()) or not torch.equal(own, group.bincount(minlength=len(own))):
            raise ValueError(
                f"g_idx does not divide this rank's {columns} inputs into its {len(own)} groups of "
                f"{size}: with desc_act, a layer whose inputs are split over ranks is not "
                f"supported; use one rank"
            )
        return group.argsort(stable=True)
