"""Experts whose rows have the same bits in every batch, for `--batch-invariant`.

Tiles may depend on the number of pairs, since they change no sum, but splits of the inputs may not.
There are none: a split of many pairs would cost more than one of few saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from atom.model_ops.gates import SILU, SiluGate, SituGate
from atom.model_ops.kernels.triton.products import moe_experts as numbers
from atom.model_ops.kernels.triton.products import quant_experts as codes
from atom.model_ops.kernels.triton.products.quant_layout import TileWeights
from atom.model_ops.quant.rounding import Rows
from atom.platform import current_platform


def _unsplit(
    mixture: Callable[..., torch.Tensor],
    x: Rows,
    w13: torch.Tensor | TileWeights,
    w2: torch.Tensor | TileWeights,
    weights: torch.Tensor,
    ids: torch.Tensor,
    elsewhere: int = 0,
    gate: SiluGate | SituGate = SILU,
) -> torch.Tensor:
    """The ops of `moe_experts` and `quant_experts`."""
    kind = current_platform().kind
    return mixture(kind, x, w13, w2, weights, ids, elsewhere, gate, splits=1)


moe_experts = partial(_unsplit, numbers.mixture)
quant_experts = partial(_unsplit, codes.mixture)
