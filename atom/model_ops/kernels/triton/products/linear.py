"""Products whose rows have the same bits in every batch, for `--batch-invariant`.

A library chooses its algorithm, and so the order of a row's sum, by the number of rows. Here every
number of rows is computed with the same tiles. An output is summed over blocks of `_BLOCK_K` inputs
in order; where the weights have too few rows to keep a GPU busy, the inputs are cut into splits,
which their shape alone decides and which are added in order. A program that takes all splits of its
outputs, and programs that take one each and whose last one adds them, give the same bits, as in
`quant_linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.torch import linear as torch_linear
from atom.model_ops.kernels.torch.quant import DenseWeights
from atom.model_ops.kernels.torch.quant import quant_embedding as quant_embedding
from atom.model_ops.kernels.triton.products.quant_product import finish, no_sums
from atom.model_ops.kernels.triton.products.quant_splits import choose_splits, choose_tiles, tile_of
from atom.model_ops.kernels.triton.splits import BUSY, add_splits, arrivals, arrives_last
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

# Rows of x in a tile, few or many: NVIDIA's and AMD's wide instructions are filled, and a single
# row costs little more than reading the weights.
_ROWS = 64
_BLOCK_K = {torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
_GROUP_M = 8


def refuses(query: OpQuery) -> str | None:
    """Why products are left to a library; None if they are not."""
    if query.batch_invariant:
        return None
    return "for --batch-invariant alone: a library's product is faster"


def refuses_logits(query: OpQuery) -> str | None:
    """The same, unless the library's product is wrong on this device."""
    return None if torch_linear.refuses_logits(query) else refuses(query)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in], weight [out, in], bias [out] -> `x @ weight.T + bias`, [..., out]."""
    return product(current_platform().kind, x, weight, bias, x.dtype)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [R, in], weight [V, in] -> `x @ weight.T`, [R, V] float32: the sums as they are."""
    return product(current_platform().kind, x, weight, None, torch.float32)


def quant_logits(x: torch.Tensor, weights: DenseWeights) -> torch.Tensor:
    """x [R, in] -> [R, out] float32, of dequantised weights."""
    return logits(weights.round_inputs(x), weights.weight)


def product(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`linear` with the tiles of a platform `kind`, rounded once to `out_dtype`."""
    rows, inputs = weight.shape
    out = x.new_empty(*x.shape[:-1], rows, dtype=out_dtype)
    splits = choose_splits(kind, rows, inputs, _BLOCK_K[x.dtype])
    flat = x.reshape(1, -1, inputs)
    _launch(kind, flat, weight[None], bias, out.view(1, -1, rows), splits)
    return out


def matrix_products(kind: str, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [B, T, in] @ weight [B, n, in] transposed -> out [B, T, n], all with any strides but the
    last of `out`, which is dense.
    """
    _launch(kind, x, weight, None, out, 1)


def _launch(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    splits: int,
) -> None:
    """Args:
    x: [B, T, in].
    weight: [B, n, in].
    out: [B, T, n].
    splits: of the inputs; more than 1 only if B is 1.
    """
    matrices, tokens, inputs = x.shape
    rows, block_k = weight.shape[1], _BLOCK_K[x.dtype]
    if not out.numel():
        return
    tiles = choose_tiles(kind, _ROWS, x.dtype == torch.float32)
    programs = triton.cdiv(tokens, tiles.block_m) * triton.cdiv(rows, tiles.block_n)
    apart = splits > 1 and programs < BUSY.get(kind, 1)
    sums = arrived = None
    if apart:
        sums = x.new_empty(splits, tokens, rows, dtype=torch.float32)
        arrived = arrivals(x.device)
    _product[(programs, splits if apart else 1, matrices)](
        x,
        weight,
        bias,
        out,
        sums,
        arrived,
        tokens,
        inputs,
        rows,
        *x.stride(),
        *weight.stride(),
        *out.stride()[:2],
        SPLITS=splits,
        APART=apart,
        WEIGHTS_FIRST=tiles.weights_first,
        WHOLE_K=inputs % block_k == 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        GROUP_M=_GROUP_M,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **tiles.options,
    )


@triton.jit(do_not_specialize=["tokens", "stride_x", "stride_weight", "stride_matrix"])
def _product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    arrived_ptr,
    tokens,
    inputs,
    rows,
    stride_x,
    stride_token,
    stride_input,
    stride_weight,
    stride_row,
    stride_column,
    stride_matrix,
    stride_out,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid: tiles of outputs, splits if APART, matrices. Out [matrices, tokens, rows]; sums of
    splits [splits, tokens, rows].

    Elements beyond the last token or row are computed from a valid address and not stored.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), tokens, rows, BLOCK_M, BLOCK_N, GROUP_M)
    matrix = tl.program_id(2).to(tl.int64)
    lanes_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes_k = tl.arange(0, BLOCK_K)
    token = tl.minimum(lanes_m, tokens - 1).to(tl.int64)
    place = tl.minimum(lanes_n, rows - 1).to(tl.int64)
    x_ptrs = x_ptr + matrix * stride_x + token[:, None] * stride_token
    weight_ptrs = weight_ptr + matrix * stride_weight + place[:, None] * stride_row
    blocks = tl.cdiv(inputs, BLOCK_K)
    per_split = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(1) if APART else 0
    last = first + 1 if APART else SPLITS
    total = no_sums(BLOCK_M, BLOCK_N, False, WEIGHTS_FIRST)
    for split in range(first, last):
        acc = tl.zeros_like(total)
        for block in range(split * per_split, tl.minimum((split + 1) * per_split, blocks)):
            columns = (block * BLOCK_K + lanes_k)[None, :]
            if WHOLE_K:
                x = tl.load(x_ptrs + columns * stride_input)
                weight = tl.load(weight_ptrs + columns * stride_column)
            else:
                inside = columns < inputs
                x = tl.load(x_ptrs + columns * stride_input, mask=inside, other=0.0)
                weight = tl.load(weight_ptrs + columns * stride_column, mask=inside, other=0.0)
            if WEIGHTS_FIRST:
                acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
            else:
                acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        total += acc
    if WEIGHTS_FIRST:
        total = tl.trans(total)

    lanes_m = lanes_m.to(tl.int64)
    mask = (lanes_m < tokens)[:, None] & (lanes_n < rows)[None, :]
    if APART:
        stride = tokens.to(tl.int64) * rows
        part_ptrs = sums_ptr + lanes_m[:, None] * rows + lanes_n[None, :]
        tl.store(part_ptrs + tl.program_id(1) * stride, total, mask=mask)
        if not arrives_last(arrived_ptr + tl.program_id(0)):
            return
        total = add_splits(part_ptrs, mask, stride)
    out_ptrs = out_ptr + matrix * stride_matrix + lanes_m[:, None] * stride_out + lanes_n[None, :]
    result = finish(total, None, None, bias_ptr, token, place)
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
