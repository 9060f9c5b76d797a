"""Products with quantised weights, which the kernel dequantises tile by tile.

Results are batch-invariant: inputs are split by the shape of the weights alone, a split is one
float32 accumulator over blocks of inputs in order, and splits are added in order. Programs that
take all splits of their outputs and programs that leave that to a second kernel give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.triton.moe_experts import Tiles
from atom.model_ops.kernels.triton.quant_layout import (
    TileWeights,
    block_k,
    prepare_tiles,
    refuses_tiles,
)
from atom.model_ops.kernels.triton.quant_tiles import quant_product
from atom.model_ops.quant.weights import QuantWeights
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

# Programs that keep a GPU busy: about two for each unit of an H100 and of an MI300X.
_BUSY = {"cuda": 264, "rocm": 608}
_MOST_SPLITS = 8
# A split has at least so many blocks of inputs.
_LEAST_BLOCKS = 4
_SUM_BLOCK = 512
_GROUP_M = 8


def choose_splits(kind: str, rows: int, blocks: int) -> int:
    """Parts that the inputs are summed in, from the shape of the weights alone."""
    tiles = -(-rows // choose_tiles(kind, 1, False).block_n)
    wanted = min(_BUSY.get(kind, 1) // tiles, blocks // _LEAST_BLOCKS, _MOST_SPLITS)
    if wanted <= 1:
        return 1
    per_split = -(-blocks // wanted)
    return -(-blocks // per_split)  # none is empty


def choose_tiles(kind: str, tokens: int, wide: bool) -> Tiles:
    """Tiles for a platform `kind`; `wide` means float32.

    AMD's two matrix instructions and NVIDIA's two sum in different orders: all tiles of a platform
    use the same, as those of `moe_experts`.
    """
    block_m = min(max(triton.next_power_of_2(tokens), 16), 64 if wide else 128)
    few = tokens <= 64
    if kind == "cuda":
        if few or wide:
            return Tiles(block_m, 64, 4, 4 if few else 2, weights_first=True)
        return Tiles(block_m, 128, 8, 3, weights_first=True)
    options = {"matrix_instr_nonkdim": 16}
    if few:
        block_n = 32 if tokens <= 16 else 64
        return Tiles(block_m, block_n, 2 if block_n == 32 else 4, 3, options=options)
    return Tiles(block_m, 64 if wide else 128, 4 if wide else 8, 2, options=options)


def refuses(query: OpQuery) -> str | None:
    """Why the weights cannot be multiplied; None if they can."""
    if query.weights is None:
        return "needs a format of weights"
    rows, inputs = query.shape.get("out_features"), query.shape.get("in_features")
    return refuses_tiles(query.weights, rows, inputs, query.platform)


def prepare(weights: QuantWeights, _: torch.dtype) -> TileWeights:
    """The layout of `quant_layout`."""
    return prepare_tiles(weights, current_platform())


def quant_linear(x: torch.Tensor, weights: TileWeights, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] -> [..., out], accumulated in float32."""
    return product(current_platform().kind, x, weights, bias)


def product(
    kind: str, x: torch.Tensor, weights: TileWeights, bias: torch.Tensor | None
) -> torch.Tensor:
    """`quant_linear` with the tiles of a platform `kind`."""
    if weights.column_order is not None:
        x = x.index_select(-1, weights.column_order)
    flat = x.reshape(-1, weights.inputs)
    tokens, rows = flat.shape[0], weights.rows
    out = x.new_empty(tokens, rows)
    if not tokens:
        return out.view(*x.shape[:-1], rows)
    tiles = choose_tiles(kind, tokens, x.dtype == torch.float32)
    size_k = block_k(weights.format)
    splits = choose_splits(kind, rows, triton.cdiv(weights.inputs, size_k))
    programs = triton.cdiv(tokens, tiles.block_m) * triton.cdiv(rows, tiles.block_n)
    apart = splits > 1 and programs < _BUSY.get(kind, 1)
    sums = x.new_empty(splits, tokens, rows, dtype=torch.float32) if apart else out
    _quant_linear[(programs, splits if apart else 1)](
        flat,
        weights.codes,
        weights.scale,
        weights.zeros,
        weights.row_scale,
        bias,
        sums,
        tokens,
        weights.inputs,
        rows,
        *flat.stride(),
        weights.codes.stride(0),
        **weights.constants(),
        SPLITS=splits,
        APART=apart,
        WEIGHTS_FIRST=tiles.weights_first,
        WHOLE_K=weights.inputs % size_k == 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=size_k,
        GROUP_M=_GROUP_M,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **tiles.options,
    )
    if apart:
        _sum_splits[(tokens, triton.cdiv(rows, _SUM_BLOCK))](
            sums,
            weights.row_scale,
            bias,
            out,
            tokens,
            rows,
            HAS_ROW_SCALE=weights.row_scale is not None,
            SPLITS=splits,
            BLOCK=_SUM_BLOCK,
            num_warps=4,
        )
    return out.view(*x.shape[:-1], rows)


@triton.jit
def _quant_linear(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zeros_ptr,
    row_scale_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    inputs,
    rows,
    stride_token,
    stride_input,
    stride_row,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of outputs [tokens, rows], or of one split's sums [splits, tokens, rows] if APART.

    Elements beyond the last token or row are computed from a valid address and not stored.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tokens, rows, BLOCK_M, BLOCK_N, GROUP_M)
    token = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.minimum(row, rows - 1)
    x_ptrs = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * stride_token
    blocks = tl.cdiv(inputs, BLOCK_K)
    per_split = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(1) if APART else 0
    last = first + 1 if APART else SPLITS
    if WEIGHTS_FIRST:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in range(first, last):
        total += quant_product(
            tl.zeros_like(total),
            x_ptrs,
            codes_ptr,
            scale_ptr,
            zeros_ptr,
            places,
            split * per_split,
            tl.minimum((split + 1) * per_split, blocks),
            inputs,
            rows,
            stride_input,
            stride_row,
            CODES,
            ROWS,
            COLUMNS,
            SCALE_TYPE,
            HAS_ZEROS,
            WEIGHTS_FIRST,
            WHOLE_K,
        )
    if WEIGHTS_FIRST:
        total = tl.trans(total)

    offsets = token.to(tl.int64)[:, None] * rows + row[None, :]
    mask = (token < tokens)[:, None] & (row < rows)[None, :]
    if APART:
        offsets += tl.program_id(1).to(tl.int64) * tokens * rows
    else:
        total = finish(total, row_scale_ptr, bias_ptr, places, HAS_ROW_SCALE)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def tile_of(
    program,
    tokens,
    rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The tile of outputs of a program: neighbours share up to GROUP_M tiles of tokens."""
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(rows, BLOCK_N)
    first = program // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return first + within % height, within // height


@triton.jit
def finish(total, row_scale_ptr, bias_ptr, places, HAS_ROW_SCALE: tl.constexpr):
    """Sums [..., rows] to outputs."""
    if HAS_ROW_SCALE:
        total *= tl.load(row_scale_ptr + places)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + places).to(tl.float32)[None, :]
    return total


@triton.jit
def _sum_splits(
    sums_ptr,
    row_scale_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    rows,
    HAS_ROW_SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of outputs of one token, from sums [splits, tokens, rows]."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    total = tl.zeros([1, BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        part_ptr = sums_ptr + (split * tokens + token) * rows
        total += tl.load(part_ptr + row, mask=inside, other=0.0)[None, :]
    places = tl.minimum(row, rows - 1)
    total = finish(total, row_scale_ptr, bias_ptr, places, HAS_ROW_SCALE)
    out_ptrs = out_ptr + token * rows + row
    tl.store(out_ptrs[None, :], total.to(out_ptr.dtype.element_ty), mask=inside[None, :])
