"""Linear layers with weights split over a group of ranks.

Weights are this rank's [out_features, in_features]. A fused layer stacks several checkpoint
matrices along the output; `load_weight` copies each to its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.base import LayerKind
from atom.model_ops.quant.inputs import resolve_product, take_weights
from atom.model_ops.quant.rounding import InputRounding, Rows
from atom.model_ops.quant.storage import Cut, MatrixStorage, Part
from atom.model_ops.quant.weights import dequantise, held_bytes
from atom.model_ops.registry import OpChoice
from atom.model_ops.weights import copy_weight


class StackedMatrix(nn.Module):
    """Weights of one product: the checkpoint's matrices in `parts`, one above the other.

    Attributes:
        weight: [out_features, in_features], if it is not quantised.
        bias: [out_features], or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    _dequantises = True

    def __init__(
        self,
        parts: Mapping[str | None, Part],
        bias: bool,
        context: LayerContext,
        prefix: str,
        kind: LayerKind = "linear",
    ) -> None:
        super().__init__()
        self.group = context.group
        self.parts = parts
        parent = prefix.rpartition(".")[0]
        names = [f"{parent}.{part}".lstrip(".") for part in parts if part is not None]
        method = context.quant.method_for(prefix, names, kind)
        matrices = tuple(parts.values())
        try:
            self.storage = MatrixStorage(self, matrices, method, context, has_bias=bias)
        except ValueError as error:
            raise ValueError(f"{prefix}: {error}") from error
        self.in_features = self.storage.columns
        self.out_features = sum(self.storage.rows)
        if bias or "bias" not in self.storage.stored:
            self.bias = context.empty(self.out_features) if bias else None
        self._dtype = context.dtype

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load tensor `name` of the checkpoint's matrix `shard`; None if there is only one."""
        if shard not in self.parts:
            matrices = ", ".join(str(part) for part in self.parts if part is not None)
            raise ValueError(
                f"{name} consists of {matrices}, not {shard}"
                if matrices
                else f"{name} has no shard {shard}"
            )
        part = self.parts[shard]
        if name in self.storage.stored:
            self.storage.load(name, tensor, part)
        elif name == "bias" and self.bias is not None:
            self._load_bias(self.bias, tensor, part)
        else:
            raise ValueError(f"it consists of {', '.join(self.storage.stored)}, not {name}")

    def _load_bias(self, bias: torch.Tensor, tensor: torch.Tensor, part: Part) -> None:
        rows = part.rows
        if tensor.shape != (rows.total,):
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants [{rows.total}]"
            )
        mine = bias[part.offset : part.offset + rows.size]
        copy_weight(mine, tensor[rows.start : rows.start + rows.size])

    @property
    def dequantised_bytes(self) -> int:
        """Of what takes the place of quantised weights; 0 if they stay quantised."""
        if self.storage.format is None or not self._dequantises:
            return 0
        return self.out_features * self.in_features * self._dtype.itemsize


class PreparedMatrix(StackedMatrix):
    """Quantised weights are converted once, after loading, to what the op of their product reads.

    Attributes:
        choice: the op and its implementation, once `resolve` was called.
    """

    choice: OpChoice
    _prepared: Any = None

    def resolve(self, op: str, context: LayerContext, prefix: str) -> None:
        """Choose the implementation of `op`, or of that for quantised weights.

        Raises:
            ConfigError: when its inputs cannot be rounded as `--activations` says.
        """
        try:
            self.choice = resolve_product(
                op,
                self.storage.format,
                context,
                in_features=self.in_features,
                out_features=self.out_features,
            )
        except ConfigError as error:
            raise ConfigError(f"{prefix}: {error}") from error
        self._dequantises = self.choice.dequantises

    @property
    def quantised_bytes(self) -> int:
        """Of weights that are no parameters but in the form that the op made of quantised ones."""
        return held_bytes(self._prepared)

    def process_after_loading(self) -> None:
        if self.storage.format is None:
            return
        self._prepared = take_weights(self.storage, self.choice)
        if self.choice.prepare is not None:
            self._prepared = self.choice.prepare(self._prepared, self._dtype)


class LinearBase(PreparedMatrix):
    """A product with its input."""

    def __init__(
        self,
        parts: Mapping[str | None, Part],
        bias: bool,
        context: LayerContext,
        prefix: str,
    ) -> None:
        super().__init__(parts, bias, context, prefix)
        self.resolve("linear", context, prefix)
        self._product = self.choice.function

    def rounding(self) -> InputRounding | None:
        """How a norm may round the inputs, once weights are loaded; None if it may not."""
        rounding: InputRounding | None = None
        if self.choice.takes_rounded:
            rounding = self._prepared.rounding
        return rounding

    def forward(self, x: Rows) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        weights = self._prepared
        if weights is None:
            weights = self.weight
        out: torch.Tensor = self._product(x, weights, self.bias)
        return out


class DequantisedMatrix(StackedMatrix):
    """Weights that are read otherwise than by a product with a layer's input.

    Quantised ones are dequantised once, after loading.
    """

    def process_after_loading(self) -> None:
        if self.storage.format is None:
            return
        weight = dequantise(self.storage.take(), self._dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)


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

    def multiply(self, x: Rows, shard: str) -> torch.Tensor:
        """The product with one matrix alone: [T, in_features] -> [T, its rows]."""
        part = self.parts[shard]
        rows = slice(part.offset, part.offset + part.rows.size)
        out: torch.Tensor
        if self._prepared is None:
            bias = None if self.bias is None else self.bias[rows]
            out = self._product(x, self.weight[rows], bias)
        else:
            out = self(x)[:, rows]
        return out


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
    ) -> None:
        rank = context.group.rank
        self.head_dim = head_dim
        self.num_heads = context.group.divide(num_heads, "num_attention_heads")
        kv_rows = kv_share(context.group, num_kv_heads, head_dim)
        self.num_kv_heads = kv_rows.size // head_dim
        q = self.num_heads * head_dim
        rows = {
            "q_proj": Cut(rank * q, q, num_heads * head_dim),
            "k_proj": kv_rows,
            "v_proj": kv_rows,
        }
        super().__init__(stack(rows, in_features), bias, context, prefix)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, out_features] -> q [T, heads, d], k and v [T, kv_heads, d], views."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        # Half the overhead of `torch.split`, which matters for single tokens.
        return torch.split_with_sizes(qkv.view(qkv.shape[0], -1, self.head_dim), heads, 1)


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
        heads = [self.num_kv_heads] * 2
        return torch.split_with_sizes(kv.view(kv.shape[0], -1, self.head_dim), heads, 1)


class RowParallelLinear(LinearBase):
    """Input features split over the ranks: the sum of their outputs is the product.

    The caller sums, as `ResidualRMSNorm.add` does. The first rank adds the bias.
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

    def process_after_loading(self) -> None:
        super().process_after_loading()
        if self.group.rank > 0:
            self.bias = None


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
