"""Mixture of quantised experts: dequantised tile by tile, or products of codes with codes.

With one split, results are batch-invariant, for the reasons given in `moe_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom.model_ops.gates import SILU, SiluGate, SituGate
from atom.model_ops.kernels.triton.products import moe_experts
from atom.model_ops.kernels.triton.products.moe_align import ExpertBlocks
from atom.model_ops.kernels.triton.products.moe_experts import Tiles, mix
from atom.model_ops.kernels.triton.products.moe_experts import choose_tiles as tiles_of_numbers
from atom.model_ops.kernels.triton.products.moe_splits import (
    choose_splits,
    parts_of,
    split_blocks,
)
from atom.model_ops.kernels.triton.products.moe_tiles import add_rows, store_outputs, weight_rows
from atom.model_ops.kernels.triton.products.quant_inputs import is_exact, is_wide, read_inputs
from atom.model_ops.kernels.triton.products.quant_layout import (
    TileWeights,
    prepare_tiles,
    refuses_tiles,
)
from atom.model_ops.kernels.triton.products.quant_product import add_product, finish, no_sums
from atom.model_ops.kernels.triton.products.quantise import refuses_activations
from atom.model_ops.quant.rounding import QuantInputs, Rows, unrounded
from atom.model_ops.quant.weights import QuantWeights
from atom.model_ops.registry import OpQuery
from atom.platform import current_platform

# Inputs per iteration of the product with the expert that is not quantised.
_PLAIN_K = tl.constexpr(64)


def refuses(query: OpQuery) -> str | None:
    """Why these experts are not supported; None if they are."""
    form = query.weights
    if form is None:
        return "needs a format of weights"
    reason = moe_experts.refuses(query)
    hidden, inter = query.shape["hidden_size"], query.shape["intermediate_size"]
    for rows, inputs in ((2 * inter, hidden), (hidden, inter)):
        reason = reason or refuses_tiles(form, rows, inputs, query.platform)
        if form.activations is not None:
            reason = reason or refuses_activations(form.activations, inputs)
    return reason


def prepare(w13: QuantWeights, w2: QuantWeights, _: torch.dtype) -> tuple[TileWeights, TileWeights]:
    """The layout of `quant_layout`."""
    platform = current_platform()
    return prepare_tiles(w13, platform), prepare_tiles(w2, platform)


def quant_experts(
    x: Rows,
    w13: TileWeights,
    w2: TileWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: SiluGate | SituGate = SILU,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert[ids[t, k]](x[t])`, x [T, hidden] -> [T, hidden].

    As `moe_experts`; the inputs of both products are quantised as the format says, x by the norm
    before it where that could. Not those of the expert that is not quantised itself.
    """
    return mixture(current_platform().kind, x, w13, w2, weights, ids, elsewhere, gate)


def quant_experts_into(
    x: Rows,
    w13: TileWeights,
    w2: TileWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int,
    gate: SiluGate | SituGate,
    out: torch.Tensor,
) -> None:
    """`quant_experts`, written to `out` [T, hidden]."""
    mixture(current_platform().kind, x, w13, w2, weights, ids, elsewhere, gate, out=out)


def mixture(
    kind: str,
    x: Rows,
    w13: TileWeights,
    w2: TileWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: SiluGate | SituGate = SILU,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`quant_experts` with the tiles of a platform `kind`; `splits` is None to fill the device, and
    `out` for new memory.
    """
    num_pairs, top_k = ids.numel(), ids.shape[1]
    rows = unrounded(x)
    if w13.plain is not None:
        rows = rows.contiguous()

    def up(blocks: ExpertBlocks) -> _Inputs:
        inputs = read_inputs(x, w13)
        activated = rows.new_empty(num_pairs, w2.inputs)
        tiles = choose_tiles(kind, blocks.block_m, num_pairs, w13.rows, inputs, w13)
        parts = splits
        if parts is None:
            parts = choose_splits(kind, tiles.programs(blocks, w13.rows), w13.inputs)
        both = _Inputs(inputs, rows)
        grouped_product(
            both, w13, activated, blocks, tiles, top_k, gated=True, splits=parts, gate=gate
        )
        return _Inputs(read_inputs(activated, w2), activated)

    def down(both: _Inputs, start: int, out: torch.Tensor, blocks: ExpertBlocks) -> None:
        width = out.shape[1]
        tiles = choose_tiles(kind, blocks.block_m, num_pairs, width, both.rounded, w2)
        grouped_product(both, w2, out, blocks, tiles, 1, gated=False, first_row=start)

    # Products of codes have an accumulator more; on NVIDIA more than 64 pairs do not fit.
    largest = 64 if kind == "cuda" and "codes" in (w13.way, w2.way) else 128
    return mix(rows, w13.num_experts, up, down, weights, ids, elsewhere, largest, out)


def choose_tiles(
    kind: str, block_m: int, num_pairs: int, rows: int, inputs: QuantInputs, weights: TileWeights
) -> Tiles:
    """`moe_experts.choose_tiles`, but larger for few pairs with four-bit codes on NVIDIA: these are
    fewer bytes and more work.
    """
    if kind == "cuda" and block_m == 16 and weights.format.codes_per_byte == 2:
        return Tiles(16, 128, 8, 3, weights_first=True)
    return tiles_of_numbers(kind, block_m, num_pairs, rows, is_wide(inputs))


@dataclass(frozen=True)
class _Inputs:
    """Of a product: as quantised weights read them, and as they are."""

    rounded: QuantInputs
    rows: torch.Tensor


def grouped_product(
    both: _Inputs,
    weights: TileWeights,
    out: torch.Tensor,
    blocks: ExpertBlocks,
    tiles: Tiles,
    visits_per_row: int,
    gated: bool,
    first_row: int = 0,
    splits: int = 1,
    gate: SiluGate | SituGate = SILU,
) -> None:
    """`moe_experts.grouped_product` with the weights' rows from `first_row` on."""
    x, plain = both.rounded, weights.plain
    width = weights.rows if gated else out.shape[1]
    rows = None if plain is None else both.rows
    _grouped_quant[(tiles.programs(blocks, width), splits)](
        x.numbers,
        x.scale,
        weights.codes,
        weights.scale,
        weights.zeros,
        weights.row_scale,
        rows,
        plain,
        out,
        *parts_of(out, width, splits),
        blocks.pairs,
        blocks.experts,
        blocks.count,
        weights.codes.shape[0],
        out.shape[0],
        first_row,
        width,
        weights.rows,
        weights.inputs,
        *x.numbers.stride(),
        0 if x.scale is None else x.scale.stride(0),
        *weights.codes.stride()[:2],
        *(
            0 if tensor is None else tensor.stride(0)
            for tensor in (weights.scale, weights.zeros, weights.row_scale, rows, plain)
        ),
        out.stride(0),
        **weights.constants(),
        WHOLE_PLAIN=weights.inputs % _PLAIN_K.value == 0,
        # More would take the shared memory of programs with quantised weights, which are smaller.
        PLAIN_STAGES=3 if tiles.weights_first else 2,
        X_GROUP=x.group,
        IS_EXACT=is_exact(x, weights),
        VISITS_PER_ROW=visits_per_row,
        GATED=gated,
        BETA=gate.numbers[0],
        LINEAR_BETA=gate.numbers[1],
        SPLIT=splits > 1,
        WEIGHTS_FIRST=tiles.weights_first,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **tiles.options,
    )


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["count_ptr"])
def _grouped_quant(
    x_ptr,
    x_scale_ptr,
    codes_ptr,
    scale_ptr,
    zeros_ptr,
    row_scale_ptr,
    rows_ptr,
    plain_ptr,
    out_ptr,
    sums_ptr,
    arrived_ptr,
    pairs_ptr,
    experts_ptr,
    count_ptr,
    num_quantised,
    num_pairs,
    first_row,
    width,
    rows,
    inputs,
    stride_x,
    stride_input,
    stride_x_scale,
    stride_expert,
    stride_row,
    expert_scales,
    expert_zeros,
    expert_rows,
    stride_rows,
    stride_plain,
    stride_out,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    WAY: tl.constexpr,
    WHOLE_PLAIN: tl.constexpr,
    PLAIN_STAGES: tl.constexpr,
    X_GROUP: tl.constexpr,
    IS_EXACT: tl.constexpr,
    VISITS_PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    SPLIT: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of pairs times one tile of `width` rows of its expert, from `first_row` on; or a
    split of it. The expert after those that are quantised is not.
    """
    tiles = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    count = tl.load(count_ptr)
    if block >= count:
        return
    if plain_ptr is not None:
        block = count - 1 - block  # the last expert has the most bytes, so it goes first
    pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    tokens = (tl.minimum(pairs, num_pairs - 1) // VISITS_PER_ROW).to(tl.int64)
    places = first_row + weight_rows(tile, width, GATED, BLOCK_N)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    first = 0
    last = tl.cdiv(inputs, BLOCK_K)
    if SPLIT:
        first, last = split_blocks(inputs, BLOCK_K)
    if plain_ptr is not None:  # noqa: SIM102 - without it the rest is not compiled
        if expert == num_quantised:
            acc = add_rows(
                no_sums(BLOCK_M, BLOCK_N, False, WEIGHTS_FIRST),
                rows_ptr + tokens * stride_rows,
                plain_ptr + places * stride_plain,
                first * BLOCK_K,
                tl.minimum(last * BLOCK_K, inputs),
                inputs,
                1,
                WEIGHTS_FIRST,
                WHOLE_PLAIN,
                _PLAIN_K,
                PLAIN_STAGES,
            )
            if WEIGHTS_FIRST:
                acc = tl.trans(acc)
            store_outputs(
                acc,
                out_ptr,
                sums_ptr,
                arrived_ptr,
                pairs,
                num_pairs,
                tile,
                width,
                stride_out,
                GATED,
                BETA,
                LINEAR_BETA,
            )
            return
    codes_ptr += expert * stride_expert
    if scale_ptr is not None:
        scale_ptr += expert * expert_scales
    if zeros_ptr is not None:
        zeros_ptr += expert * expert_zeros
    acc = add_product(
        no_sums(BLOCK_M, BLOCK_N, IS_EXACT, WEIGHTS_FIRST),
        x_ptr,
        x_scale_ptr,
        codes_ptr,
        scale_ptr,
        zeros_ptr,
        tokens,
        places,
        first,
        last,
        inputs,
        rows,
        stride_x,
        stride_input,
        stride_x_scale,
        stride_row,
        WAY,
        CODES,
        ROWS,
        COLUMNS,
        SCALE_TYPE,
        HAS_ZEROS,
        X_GROUP,
        WEIGHTS_FIRST,
        WHOLE_K,
    )
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    if row_scale_ptr is not None:
        row_scale_ptr += expert * expert_rows
    acc = finish(acc, x_scale_ptr, row_scale_ptr, None, tokens, places, X_GROUP)
    store_outputs(
        acc,
        out_ptr,
        sums_ptr,
        arrived_ptr,
        pairs,
        num_pairs,
        tile,
        width,
        stride_out,
        GATED,
        BETA,
        LINEAR_BETA,
    )
