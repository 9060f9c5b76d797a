"""Norms, with the sum that usually precedes them: over the ranks, and with a residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import nn

from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.rounding import InputRounding, Rows
from atom.model_ops.quant.storage import Cut
from atom.model_ops.rank_sums import resolve_plain_sum, resolve_sum
from atom.model_ops.registry import OpChoice
from atom.model_ops.weights import copy_weight

# The arguments of a norm -> rows, rounded or not, and what else the norm returns.
RoundedNorm: TypeAlias = Callable[..., tuple[Rows, torch.Tensor]]


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, computed in float32."""

    op: ClassVar[str] = "rms_norm"

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(size)
        self.eps = eps
        self._norm = context.ops.resolve(self.op, context.dtype, size=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        out: torch.Tensor = self._norm(x, self.weight, self.eps)
        return out


class SummedRMSNorm(RMSNorm):
    """The norm of a sum that a layer leaves to the ranks, before anything is added to it."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__(size, eps, context)
        self._group = context.group
        self._sum = resolve_plain_sum(size, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part [T, size], which may be overwritten -> [T, size], equal on all ranks."""
        return super().forward(x if self._sum is None else self._sum(x, self._group))


class SplitRMSNorm(RMSNorm):
    """The norm of rows of which each rank has some columns: its heads of all.

    Args:
        share: this rank's columns; several ranks may have the same.
    """

    def __init__(self, share: Cut, eps: float, context: LayerContext) -> None:
        super().__init__(share.size, eps, context)
        self._share, self._group = share, context.group
        precise = replace(context, dtype=torch.float32)
        self._sum = resolve_plain_sum(1, precise)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load this rank's columns of the whole weight."""
        share = self._share
        if tensor.shape != (share.total,):
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants [{share.total}]"
            )
        copy_weight(self.weight, tensor[share.start : share.start + share.size])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, own columns] -> the same shape."""
        if self._sum is None:
            return super().forward(x)
        rows, share = x.float(), self._share
        squares = self._sum(rows.square().sum(-1, keepdim=True), self._group)
        # Columns that several ranks have were counted as often.
        mean = squares / (self._group.size * share.size)
        normed = (rows * torch.rsqrt(mean + self.eps)).to(x.dtype)
        return normed * self.weight


class LayerNorm(RMSNorm):
    """The norm of `x - mean(x)`; without a bias."""

    op = "layer_norm"


class HeadsLayerNorm(LayerNorm):
    """The norm of each head, with a weight of its own.

    Args:
        share: this rank's columns; several ranks may have the same.
    """

    def __init__(self, share: Cut, head_dim: int, eps: float, context: LayerContext) -> None:
        super().__init__(head_dim, eps, context)
        self._share = share
        self.weight = context.empty(share.size // head_dim, head_dim)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load this rank's heads of the whole weight [heads, head_dim]."""
        share, size = self._share, self.weight.shape[1]
        wanted = share.total // size, size
        if tensor.shape != wanted:
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants {list(wanted)}"
            )
        first = share.start // size
        copy_weight(self.weight, tensor[first : first + len(self.weight)])


class ResidualLayerNorm(LayerNorm):
    """As `ResidualRMSNorm`, for a layer that leaves its part of a sum."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__(size, eps, context)
        self._group = context.group
        self._sum = resolve_plain_sum(size, context)
        self._add = context.ops.resolve("add", context.dtype)

    def add(
        self, partial: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(x + residual), x + residual)`, where x is the sum of all ranks' `partial`.

        Args:
            partial: [T, size]; overwritten.
            residual: [T, size], the same on all ranks.
        """
        whole = partial if self._sum is None else self._sum(partial, self._group)
        total: torch.Tensor = self._add(whole, residual)
        return self(total), total

    feed = add  # nobody reads it rounded


class Reader(Protocol):
    """What reads a norm: a product with weights that may want it rounded.

    Attributes:
        choice: the op of the product.
    """

    choice: OpChoice

    def rounding(self) -> InputRounding | None:
        """How the norm may round what it reads, once weights are loaded; None if it may not."""
        ...


class Sublayer(nn.Module):
    """What follows a norm in a decoder layer: attention or MLP."""

    @property
    def reader(self) -> Reader | None:
        """The only one that reads its input rounded; None if there are several.

        Others may read it as it is if the rounding keeps the rows.
        """
        return None


class RMSNormPair:
    """Two norms of parts of the same rows; their weights are those of the layers' own.

    Args:
        reader: the only one that reads the first; None if there are several.
    """

    def __init__(
        self, first: RMSNorm, second: RMSNorm, reader: Reader | None, context: LayerContext
    ) -> None:
        self._layers = first, second
        sizes = len(first.weight), len(second.weight)
        norm = context.ops.resolve("rms_norm", context.dtype, size=max(sizes))
        pair = context.ops.resolve("rms_norm_pair", context.dtype, size=max(sizes))
        self._pair = _rounded_for(
            reader,
            "rms_norm_pair_quantise",
            lambda *rows: pair(*rows, norm),
            context,
            size=sizes[0],
            other_size=sizes[1],
        )

    def __call__(self, x: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        """The norms of the first and the next columns of x [T, a + b or more]: [T, a], [T, b]."""
        first, second = self._layers
        return self._pair(x, first.weight, second.weight, first.eps)


class ResidualRMSNorm(RMSNorm):
    """A norm between two layers: it completes the sum that the first one leaves to the ranks.

    Args:
        reader: of what `feed` returns, as `Sublayer` has it.
        is_whole: whether the first one leaves the whole sum on every rank.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        context: LayerContext,
        reader: Reader | None = None,
        is_whole: bool = False,
    ) -> None:
        super().__init__(size, eps, context)
        ops = context.ops
        add_norm = ops.resolve("add_rms_norm", context.dtype, size=size)
        rounded = _rounded_for(reader, "add_rms_norm_quantise", add_norm, context, size=size)
        self._add_norm, self._rounded = add_norm, rounded
        choice = None if is_whole else resolve_sum(size, context)
        if choice is not None:
            self._add_norm = _after_sum(choice.function, context.group, add_norm)
            self._rounded = _after_sum(choice.function, context.group, rounded)

    def add(
        self, partial: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(x + residual), x + residual)`, where x is the sum of all ranks' `partial`.

        Args:
            partial: [T, size]; may be overwritten.
            residual: [T, size], the same on all ranks.
        """
        out: tuple[torch.Tensor, torch.Tensor]
        out = self._add_norm(partial, residual, self.weight, self.eps)
        return out

    def feed(self, partial: torch.Tensor, residual: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        """`add`, whose norm is rounded as its reader wants it where one kernel does both."""
        return self._rounded(partial, residual, self.weight, self.eps)


def _after_sum(reduce: RoundedNorm, group: ParallelGroup, norm: RoundedNorm) -> RoundedNorm:
    """`norm` of rows that the op `all_reduce_add_rms_norm` first sums over the ranks."""

    def summed(*rows: Any) -> tuple[Rows, torch.Tensor]:
        return reduce(*rows, group, norm)

    return summed


def _rounded_for(
    reader: Reader | None, op: str, norm: RoundedNorm, context: LayerContext, **shape: int
) -> RoundedNorm:
    """`norm`, or `op`, which also rounds its first result for a reader that takes it so.

    Args:
        norm: the op without rounding.
        shape: as `op` has it.
    """
    if reader is None or not reader.choice.takes_rounded:
        return norm
    form = reader.choice.query.weights
    fused = context.ops.resolve_weights(op, context.dtype, form, **shape).function

    def rounded(*rows: Any) -> tuple[Rows, torch.Tensor]:
        rounding = reader.rounding()
        if rounding is None:
            return norm(*rows)
        out: tuple[Rows, torch.Tensor] = fused(*rows, rounding, norm)
        return out

    return rounded
