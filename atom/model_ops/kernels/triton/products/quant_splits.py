"""How a product is divided into tiles and into splits of its inputs."""

from __future__ import annotations

import triton
import triton.language as tl

from atom.model_ops.kernels.triton.products.moe_experts import Tiles
from atom.model_ops.kernels.triton.splits import BUSY

_MOST_SPLITS = 8
# A split has at least so many inputs.
_LEAST_INPUTS = 1024


def choose_splits(kind: str, rows: int, inputs: int, block_k: int) -> int:
    """Parts that the inputs are summed in, from the shape of the weights alone."""
    tiles = -(-rows // choose_tiles(kind, 1, False).block_n)
    wanted = min(BUSY.get(kind, 1) // tiles, inputs // _LEAST_INPUTS, _MOST_SPLITS)
    if wanted <= 1:
        return 1
    blocks = -(-inputs // block_k)
    per_split = -(-blocks // wanted)
    return -(-blocks // per_split)  # none is empty


def choose_tiles(kind: str, tokens: int, wide: bool, scaled: bool = False) -> Tiles:
    """Tiles for a platform `kind`; `wide` means float32, `scaled` a third accumulator.

    AMD's two matrix instructions and NVIDIA's two sum in different orders: all tiles of a platform
    use the same, as those of `moe_experts`.
    """
    block_m = 16
    most = 64 if wide or (scaled and kind == "cuda") else 128
    while block_m < min(tokens, most):
        block_m *= 2
    few = tokens <= 64
    if kind == "cuda":
        if few or wide:
            return Tiles(block_m, 64, 4, 3, weights_first=True)
        return Tiles(block_m, 128, 8, 3, weights_first=True)
    options = {"matrix_instr_nonkdim": 16}
    if few:
        if block_m == 16:
            return Tiles(16, 32, 2, 3, options=options)
        return Tiles(block_m, 64, 4, 2, options=options)
    return Tiles(block_m, 64 if wide else 128, 4 if wide else 8, 2, options=options)


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
