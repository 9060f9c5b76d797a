"""Experts whose rows have the same bits in every batch, for `--batch-invariant`.

Tiles may depend on the number of pairs, since they change no sum, but splits of the inputs may not.
There are none: a split of many pairs would cost more than one of few saves.
"""

from __future__ import annotations

import torch

from atom.model_ops.gates import SILU, SiluGate, SituGate
from atom.model_ops.kernels.triton.products import moe_experts as numbers
from atom.model_ops.kernels.triton.products import quant_experts as codes
from atom.model_ops.kernels.triton.products.quant_layout import TileWeights
from atom.model_ops.quant.rounding import Rows
from atom.platform import current_platform


def moe_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: SiluGate | SituGate = SILU,
) -> torch.Tensor:
    """`moe_experts.moe_experts`."""
    kind = current_platform().kind
    return numbers.mixture(kind, x, w13, w2, weights, ids, elsewhere, gate, splits=1)


def quant_experts(
    x: Rows,
    w13: TileWeights,
    w2: TileWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: SiluGate | SituGate = SILU,
) -> torch.Tensor:
    """`quant_experts.quant_experts`."""
    kind = current_platform().kind
    return codes.mixture(kind, x, w13, w2, weights, ids, elsewhere, gate, splits=1)
