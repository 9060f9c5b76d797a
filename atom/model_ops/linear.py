"""Linear layers with weights split over a group of ranks.

Weights are this rank's [out_features, in_features]. A fused layer stacks several checkpoint
matrices along the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch

from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.rounding import InputRounding, Rows
from atom.model_ops.quant.storage import Cut, Part
from atom.model_ops.rank_sums import SumInput
from atom.model_ops.stacked import PreparedMatrix, part_names


@runtime_checkable
class HasRows(Protocol):
    """Weights of which a product may take some rows."""

    def of_rows(self, rows: slice) -> Any:
        """The same weights, without copies; None if these rows cannot be taken by themselves."""
        ...


class LinearBase(PreparedMatrix):
    """A product with its input.

    Where its matrices are stored in several formats, each is a layer of its own within this one, by
    the name of its part, and writes its columns of the output.
    """

    def __init__(
        self,
        parts: Mapping[str | None, Part],
        bias: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        super().__init__(parts, bias, context, prefix)
        if self.storage.is_split:
            self._split(bias, context, prefix)
            return
        self.resolve("linear", context, prefix)
        self._product = self.choice.function

    def _split(self, bias: bool, context: LayerContext, prefix: str) -> None:
        names = part_names(prefix, self.parts)
        for (part, matrix), name in zip(self.parts.items(), names, strict=True):
            alone = replace(matrix, offset=0, index=0)
            layer = LinearBase({None: alone}, bias, context, name)
            self.add_module(str(part), layer)
            # Their products round rows in different ways, so no norm does.
            self.choice = replace(layer.choice, takes_rounded=False)

    def rounding(self) -> InputRounding | None:
        """How a norm may round the inputs, once weights are loaded; None if it may not."""
        rounding: InputRounding | None = None
        if self.choice.takes_rounded:
            rounding = self._prepared.rounding
        return rounding

    def forward(self, x: Rows) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        out: torch.Tensor
        if self.storage.is_split:
            assert isinstance(x, torch.Tensor)
            out = x.new_empty(*x.shape[:-1], self.out_features)
            for name, part in self.parts.items():
                columns = slice(part.offset, part.offset + part.rows.size)
                self.alone(str(name)).write(x, out[..., columns])
            return out
        weights = self.weight if self._prepared is None else self._prepared
        out = self._product(x, weights, self.bias)
        return out

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product to `out` [..., out_features], whose rows may lie apart."""
        if self.choice.into is None:
            out.copy_(self.forward(x))
        else:
            weights = self.weight if self._prepared is None else self._prepared
            self.choice.into(x, weights, self.bias, out)

    def multiply(self, x: Rows, *shards: str) -> torch.Tensor:
        """The product with neighbouring matrices alone: [T, in_features] -> [T, their rows]."""
        first, last = self.parts[shards[0]], self.parts[shards[-1]]
        rows = slice(first.offset, last.offset + last.rows.size)
        out: torch.Tensor
        if self.storage.is_split:
            return torch.cat([self.alone(shard)(x) for shard in shards], dim=-1)
        weights: Any = self.weight[rows] if self._prepared is None else None
        if isinstance(self._prepared, HasRows):
            weights = self._prepared.of_rows(rows)
        if weights is None:
            out = self(x)
            return out[:, rows]
        out = self._product(x, weights, None if self.bias is None else self.bias[rows])
        return out

    def alone(self, part: str) -> LinearBase:
        """The layer of one matrix, where they are stored in several formats."""
        layer = self.get_submodule(part)
        assert isinstance(layer, LinearBase)
        return layer


class ReplicatedLinear(LinearBase):
    """The whole matrix on every rank."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, context: LayerContext, prefix: str
    ) -> None:
        part = Part(Cut.whole(out_features), Cut.whole(in_features))
        super().__init__({None: part}, bias, context, prefix)


class MergedReplicatedLinear(LinearBase):
    """Several whole matrices with the same input, as one product."""

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        bias: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        rows = {name: Cut.whole(size) for name, size in shards.items()}
        super().__init__(stack(rows, in_features), bias, context, prefix)


class ColumnParallelLinear(LinearBase):
    """Output features split over the ranks; the output stays split."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, context: LayerContext, prefix: str
    ) -> None:
        rows = share_of(context.group, out_features, f"{prefix} out_features")
        super().__init__({None: Part(rows, Cut.whole(in_features))}, bias, context, prefix)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel matrices with the same input, as one product."""

    def __init__(
        self,
        in_features: int,
        shards: dict[str, int],
        bias: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        rows = {name: share_of(context.group, size, name) for name, size in shards.items()}
        super().__init__(stack(rows, in_features), bias, context, prefix)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections as one product, split by heads.

    With fewer KV heads than ranks, each is replicated on `size / heads` ranks.

    Args:
        has_gate: whether each query head is followed by as many rows of a gate.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        context: LayerContext,
        prefix: str,
        has_gate: bool = False,
    ) -> None:
        rank = context.group.rank
        self.head_dim = head_dim
        self.num_heads = context.group.divide(num_heads, "num_attention_heads")
        kv_rows = kv_share(context.group, num_kv_heads, head_dim)
        self.num_kv_heads = kv_rows.size // head_dim
        self._query_rows = 2 if has_gate else 1
        q = self.num_heads * head_dim * self._query_rows
        rows = {
            "q_proj": Cut(rank * q, q, num_heads * head_dim * self._query_rows),
            "k_proj": kv_rows,
            "v_proj": kv_rows,
        }
        super().__init__(stack(rows, in_features), bias, context, prefix)

    def keys_and_values(self, x: Rows) -> tuple[torch.Tensor, ...]:
        """[T, in_features] -> k and v [T, kv_heads, d], views; queries are not computed if the
        weights allow that.
        """
        heads = [self.num_kv_heads] * 2
        return by_head(self.multiply(x, "k_proj", "v_proj"), self.head_dim, heads)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, out_features] -> q [T, heads, d], k and v [T, kv_heads, d], views.

        With gates, q is [T, 2 * heads, d]: that of each head follows it.
        """
        heads = [self.num_heads * self._query_rows, self.num_kv_heads, self.num_kv_heads]
        return by_head(qkv, self.head_dim, heads)


class KVParallelLinear(LinearBase):
    """Key and value projections as one product, split by heads as in `QKVParallelLinear`."""

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_kv_heads: int,
        bias: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        rows = kv_share(context.group, num_kv_heads, head_dim)
        self.head_dim = head_dim
        self.num_kv_heads = rows.size // head_dim
        super().__init__(
            stack({"k_proj": rows, "v_proj": rows}, in_features), bias, context, prefix
        )

    def split(self, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, out_features] -> k and v [T, kv_heads, d], views."""
        return by_head(kv, self.head_dim, [self.num_kv_heads] * 2)


class RowParallelLinear(LinearBase):
    """Input features split over the ranks: the sum of their outputs is the product.

    The caller sums, as `ResidualRMSNorm.add` does. The first rank adds the bias. Where the product
    can be written to memory that the sum reads, it is: the next such product overwrites it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        columns = share_of(context.group, in_features, f"{prefix} in_features")
        part = Part(Cut.whole(out_features), columns)
        super().__init__({None: part}, bias, context, prefix)
        self._sum_input = SumInput(out_features, context)
        self._writes_sums = self._sum_input.has_memory and self.choice.into is not None

    def process_after_loading(self) -> None:
        super().process_after_loading()
        if self.group.rank > 0:
            self.bias = None

    def forward(self, x: Rows) -> torch.Tensor:
        """[T, in_features] -> this rank's part of [T, out_features]."""
        if self._writes_sums and isinstance(x, torch.Tensor):
            out = self._sum_input.rows(len(x))
            if out is not None:
                self.write(x, out)
                return out
        return super().forward(x)


def by_head(rows: torch.Tensor, head_dim: int, heads: list[int]) -> tuple[torch.Tensor, ...]:
    """[T, all heads' d] -> [T, n, d] for each n of `heads`, views."""
    # Half the overhead of `torch.split`, which matters for single tokens.
    return torch.split_with_sizes(rows.view(rows.shape[0], -1, head_dim), heads, 1)


def kv_share(group: ParallelGroup, num_kv_heads: int, head_dim: int) -> Cut:
    """This rank's rows of keys or values: with fewer heads than ranks, several have the same.

    Raises:
        ConfigError: when they do not split evenly.
    """
    replicas = max(1, group.size // num_kv_heads)
    if num_kv_heads * replicas % group.size:
        raise ConfigError(
            f"num_key_value_heads={num_kv_heads} does not split over {group.size} ranks; change "
            f"--tensor-parallel-size"
        )
    own = num_kv_heads * replicas // group.size * head_dim
    return Cut(group.rank // replicas * own, own, num_kv_heads * head_dim)


def share_of(group: ParallelGroup, total: int, what: str) -> Cut:
    """This rank's share of a dimension.

    Raises:
        ConfigError: when it does not split evenly.
    """
    size = group.divide(total, what)
    return Cut(group.rank * size, size, total)


def stack(rows: Mapping[str, Cut], in_features: int) -> dict[str | None, Part]:
    """Parts one above the other, with the same inputs."""
    offsets = accumulate((cut.size for cut in rows.values()), initial=0)
    named = zip(rows.items(), offsets, strict=False)
    return {
        name: Part(cut, Cut.whole(in_features), offset, index)
        for index, ((name, cut), offset) in enumerate(named)
    }
