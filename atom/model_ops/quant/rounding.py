"""Rows that are rounded before the product that reads them: what a kernel wants, and what it gets.

A norm can round its result for the only product that reads it, which saves a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from atom.model_ops.quant.weights import Activations

Form = Literal["codes", "numbers", "products"]


@dataclass(frozen=True)
class QuantInputs:
    """What a product with quantised weights reads, in place of rows [T, inputs].

    Attributes:
        numbers: [T, inputs] or padded: codes, or what they stand for.
        scale: [T, groups] or [T, 1], of codes or of numbers with one scale per token.
        group: inputs per scale that the product applies; 0 for one per token.
        dtype: of the rows.
        rows: [T, inputs], where something else reads them.
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None
    group: int
    dtype: torch.dtype
    rows: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """That of the rows, but for the padding and packing of inputs."""
        return self.numbers.shape


Rows: TypeAlias = torch.Tensor | QuantInputs
"""[T, size], or what a norm made of them for the product that reads them."""


def unrounded(x: Rows) -> torch.Tensor:
    """The rows themselves, of a norm that kept them."""
    if isinstance(x, torch.Tensor):
        return x
    assert x.rows is not None, "the norm's reader says that rows are kept"
    return x.rows


@dataclass(frozen=True)
class InputRounding:
    """How a product with quantised weights reads its inputs.

    Attributes:
        input_scale: float32, one number; see `Activations`.
        fp8: e4m3fn or e4m3fnuz, whose largest number is 240, so that scales are amax / 240.
        form: `codes` and their scales; codes as `numbers` of the rows' type, and their scales;
            `products` of codes and scales, rounded to the rows' type. Codes of fp4 are two to a
            byte, element 2j in the low four bits of byte j, with e8m0 scales as bytes if that is
            their type; other scales are float32.
        multiple: of inputs, to which rows are padded with zeros.
        keeps_rows: whether a norm returns the rows themselves, too.
    """

    how: Activations
    input_scale: torch.Tensor | None
    fp8: torch.dtype = torch.float8_e4m3fn
    form: Form = "codes"
    multiple: int = 1
    keeps_rows: bool = False

    @property
    def is_packed(self) -> bool:
        return self.how.codes == "fp4" and self.form == "codes"

    def padded(self, size: int) -> int:
        """The inputs that are made of `size`."""
        return -(-size // self.multiple) * self.multiple

    def place(self, rows: torch.Tensor) -> QuantInputs:
        """Memory for what is made of rows [T, size]."""
        tokens, how = rows.shape[0], self.how
        size = self.padded(rows.shape[1])
        dtype = rows.dtype
        if self.form == "codes":
            dtype = {"int8": torch.int8, "fp8": self.fp8, "fp4": torch.uint8}[how.codes]
        numbers = rows.new_empty(tokens, size // 2 if self.is_packed else size, dtype=dtype)
        if self.form == "products":
            return QuantInputs(numbers, None, 0, rows.dtype)
        is_byte = self.is_packed and how.scale_type == "e8m0"
        groups = -(-size // how.group) if how.group else 1
        scale = rows.new_empty(tokens, groups, dtype=torch.uint8 if is_byte else torch.float32)
        return QuantInputs(numbers, scale, how.group, rows.dtype)
