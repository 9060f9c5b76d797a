"""What a case of the compile lane is, and the tensors that its arguments are made of.

A case calls an op of the table with the shapes that the engine calls it with. Tensors lie on the
CPU and are never read: only types, sizes, strides and alignment reach the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from atom.model_ops.attention.metadata import AttentionMetadata
from atom.model_ops.quant.weights import WeightFormat
from atom.model_ops.registry import PLAIN, Implementation, OpQuery
from atom.platform import Platform

MARK = "@aot "  # leads the lines that a compiling process means for its parent
PLATFORMS = {
    "gfx942": Platform("rocm", "gfx942", True),
    "gfx950": Platform("rocm", "gfx950", True),
    "sm90": Platform("cuda", "sm90", True),
}


@dataclass(frozen=True)
class Case:
    """One call of one op.

    Attributes:
        name: unique; `<op>/<what is special>`.
        op, implementation, layout: the entry of the op table.
        arguments: from the query that the entry was asked, the arguments of the op.
        dtype, storage, shape, weights: the query; `storage="fp8"` is the arch's own 8 bit type.
        matrix: names of the kernels that must use matrix instructions.
        warp_groups: those that must use no others than Hopper's warp group instructions on sm90.
        hands_over: those of whose programs one reads what the others stored.
        split: the kernel whose contexts are split to fill the device, if one is.
        refused: by arch, a part of the reason with which the entry must refuse the query.
        batches: further arguments, of other batches, for which the entry that is batch-invariant
            must launch the very same kernels; () for the first entry of the implementation.
    """

    name: str
    op: str
    arguments: Callable[[OpQuery], tuple[object, ...]]
    shape: Mapping[str, int]
    implementation: str = "triton"
    dtype: torch.dtype = torch.bfloat16
    storage: torch.dtype | str | None = None
    matrix: tuple[str, ...] = ()
    warp_groups: tuple[str, ...] = ()
    hands_over: tuple[str, ...] = ()
    split: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    weights: WeightFormat | None = None
    layout: str = PLAIN
    batches: tuple[Callable[[OpQuery], tuple[object, ...]], ...] = ()

    @property
    def batch_invariant(self) -> bool:
        return bool(self.batches)

    def entry(self) -> Implementation:
        from atom.model_ops.op_table.ops import OPS

        for entry in OPS[self.op]:
            fits = entry.batch_invariant or not self.batch_invariant
            if (entry.name, entry.layout) == (self.implementation, self.layout) and fits:
                return entry
        raise LookupError(f"{self.name}: the op table has no {self.implementation} {self.op}")

    def query(self, platform: Platform) -> OpQuery:
        storage = platform.fp8_dtype if isinstance(self.storage, str) else self.storage
        return OpQuery(
            platform,
            self.dtype,
            self.shape,
            storage,
            self.weights,
            batch_invariant=self.batch_invariant,
        )


def pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A layer's part of a pool beyond 2 GiB, as on a real GPU; never touched, so no memory.

    Up to 2 GiB, Triton's AMD backend compiles another kernel: it relies on 32-bit offsets.
    """
    layers = 2**31 // (math.prod(shape) * dtype.itemsize) + 1
    return torch.empty(layers, *shape, dtype=dtype)[-1]


def decode_metadata(
    num_seqs: int, queries: int, context: int, block_size: int, *, padded: bool = False
) -> AttentionMetadata:
    """Every sequence has `queries` new tokens and at most `context` in all; as inside a graph.

    padded: whether some queries only pad the graph.
    """
    blocks = -(-context // block_size)
    return AttentionMetadata(
        slot_mapping=torch.empty(num_seqs * queries, dtype=torch.int64),
        block_tables=torch.empty(num_seqs, blocks, dtype=torch.int32),
        block_counts=torch.empty(num_seqs, dtype=torch.int32),
        context_lens=torch.empty(num_seqs, dtype=torch.int32),
        cu_seqlens_q=torch.empty(num_seqs + 1, dtype=torch.int32),
        max_seqlen_q=queries,
        max_context_len=context,
        query_lens_cpu=(queries,) * num_seqs,
        context_lens_cpu=None,
        padding_lens=torch.empty(num_seqs, dtype=torch.int32) if padded else None,
    )
