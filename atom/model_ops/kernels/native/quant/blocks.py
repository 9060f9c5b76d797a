"""Codes of GGUF's blocks: see `csrc/quant/blocks.cpp`."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.native.bindings import Kernels

# `Layout` and `Part` in csrc/quant/blocks.cpp; how many codes there are, and how many to a byte.
_LAYOUTS = {
    kind: (i, codes)
    for i, (kind, codes) in enumerate(
        (
            *(("Q4_0", 32), ("Q4_1", 32), ("Q4_K", 256), ("Q5_0", 32), ("Q5_1", 32)),
            *(("Q5_K", 256), ("Q6_K", 256), ("Q2_K", 256), ("Q3_K", 256), ("IQ4_XS", 256)),
            ("MXFP4", 32),
        )
    )
}
_LAYOUTS["IQ4_NL"] = _LAYOUTS["Q4_0"]
_PARTS = {"low_four": (0, 2), "high_two": (1, 4), "whole": (2, 1)}
_blocks = Kernels("quant_blocks", "3P4q")


def block_codes(
    kind: str, part: str, blocks: torch.Tensor, table: torch.Tensor | None = None
) -> torch.Tensor:
    """The codes of blocks of GGUF's type `kind`, by one thread.

    Args:
        part: `low_four` or `high_two` of their bits, two or four to a byte, or `whole`.
        blocks: uint8 [rows, blocks, bytes of a block], contiguous.
        table: what 16 codes stand for, of 8 bits.

    Returns:
        [rows, bytes of their codes], of the table's dtype where they are whole, else uint8.
    """
    (layout, count), (number, per_byte) = _LAYOUTS[kind], _PARTS[part]
    rows, num_blocks, block_bytes = blocks.shape
    dtype = table.dtype if table is not None and part == "whole" else torch.uint8
    out = blocks.new_empty(rows, num_blocks * count // per_byte, dtype=dtype)
    _blocks(
        None,
        blocks.data_ptr(),
        0 if table is None else table.data_ptr(),
        out.data_ptr(),
        *(rows * num_blocks, block_bytes, layout, number),
    )
    return out
