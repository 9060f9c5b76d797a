"""Experts whose rows have the same bits in every batch, for `--batch-invariant`.

Tiles may depend on the number of pairs, since they change no sum, but splits of the inputs may not.
There are none: a split of many pairs would cost more than one of few saves.
"""

from __future__ import annotations

import torch

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
) -> torch.Tensor:
    """`moe_experts.moe_experts`."""
    return numbers.mixture(current_platform().kind, x, w13, w2, weights, ids, elsewhere, splits=1)


def situ_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int,
    beta: float,
    linear_beta: float,
) -> torch.Tensor:
    """`moe_experts.situ_experts`."""
    given = x, w13, w2, weights, ids, elsewhere
    return numbers.mixture(current_platform().kind, *given, splits=1, situ=(beta, linear_beta))


def quant_situ_experts(
    x: Rows,
    w13: TileWeights,
    w2: TileWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int,
    beta: float,
    linear_beta: float,
) -> torch.Tensor:
    """`quant_experts.quant_situ_experts`."""
    given = x, w13, w2, weights, ids, elsewhere
    return codes.mixture(current_platform().kind, *given, splits=1, situ=(beta, linear_beta))


def quant_experts(
    x: Rows,
    w13: TileWeights,
    w2: TileWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
) -> torch.Tensor:
    """`quant_experts.quant_experts`."""
    return codes.mixture(current_platform().kind, x, w13, w2, weights, ids, elsewhere, splits=1)
