"""Linear layers with weights split over a group of ranks.

Weights are this rank's [out_features, in_features]. A fused layer stacks several checkpoint
matrices along the output; `load_weight` copies each to its rows.
"""

from __future__ import annotations

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext


class LinearBase(nn.Module):
    """Base of all linear layers: this rank's sizes, a quant method, parameters."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.group = context.group
        self.quant_method = context.quant.method_for(prefix)
        self.quant_method.create_weights(self, context)

    def process_after_loading(self) -> None:
        self.quant_method.process_after_loading(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x)


class ReplicatedLinear(LinearBase):
    """The whole matrix on every rank."""

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        _no_shard(name, shard)
        self.quant_method.load(self, name, tensor, 0)


class ColumnParallelLinear(LinearBase):
    """Output features split over the ranks; the output stays split."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, context: LayerContext, prefix: str
    ) -> None:
        share = context.group.divide(out_features, "out_features")
        super().__init__(in_features, share, bias, context, prefix)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        _no_shard(name, shard)
        self.quant_method.load(self, name, self.group.shard(tensor, 0), 0)


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
        self.shard_sizes = {k: context.group.divide(v, k) for k, v in shards.items()}
        super().__init__(in_features, sum(self.shard_sizes.values()), bias, context, prefix)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        offset = _shard_offset(self.shard_sizes, name, shard)
        part = self.group.shard(tensor, 0)
        _check_rows(part, self.shard_sizes[str(shard)])
        self.quant_method.load(self, name, part, offset)


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
        size = context.group.size
        self.head_dim = head_dim
        self.num_heads = context.group.divide(num_heads, "num_attention_heads")
        self.kv_replicas = max(1, size // num_kv_heads)
        if num_kv_heads * self.kv_replicas % size:
            raise ValueError(f"num_key_value_heads={num_kv_heads} does not split over {size} ranks")
        self.num_kv_heads = num_kv_heads * self.kv_replicas // size
        self.shard_sizes = {
            "q_proj": self.num_heads * head_dim,
            "k_proj": self.num_kv_heads * head_dim,
            "v_proj": self.num_kv_heads * head_dim,
        }
        super().__init__(in_features, sum(self.shard_sizes.values()), bias, context, prefix)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        offset = _shard_offset(self.shard_sizes, name, shard)
        rows = self.shard_sizes[str(shard)]
        replicas = 1 if shard == "q_proj" else self.kv_replicas
        _check_rows(tensor, rows * self.group.size // replicas)
        part = tensor.narrow(0, self.group.rank // replicas * rows, rows)
        self.quant_method.load(self, name, part, offset)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, out_features] -> q [T, heads, d], k and v [T, kv_heads, d], views."""
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        # Half the overhead of `torch.split`, which matters for single tokens.
        return torch.split_with_sizes(qkv.view(qkv.shape[0], -1, self.head_dim), heads, 1)


class RowParallelLinear(LinearBase):
    """Input features split over the ranks; partial products are summed.

    With `reduce` false the output is this rank's partial sum, which the caller must reduce.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        context: LayerContext,
        prefix: str,
        reduce: bool = True,
    ) -> None:
        self.reduce = reduce
        share = context.group.divide(in_features, "in_features")
        # Only the first rank adds the bias, before the sum.
        super().__init__(share, out_features, bias and context.group.rank == 0, context, prefix)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        _no_shard(name, shard)
        if name == "bias":
            if self.has_bias:
                self.quant_method.load(self, name, tensor, 0)
            return
        self.quant_method.load(self, name, self.group.shard(tensor, 1), 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return self.group.all_reduce(out) if self.reduce else out


def process_after_loading(model: nn.Module) -> None:
    """Convert every linear layer's weights to the layout that its op needs."""
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.process_after_loading()


def _no_shard(name: str, shard: str | None) -> None:
    if shard is not None:
        raise ValueError(f"{name} has no shard {shard}")


def _shard_offset(sizes: dict[str, int], name: str, shard: str | None) -> int:
    if shard not in sizes:
        raise ValueError(f"{name} consists of {', '.join(sizes)}, not {shard}")
    names = list(sizes)
    return sum(sizes[n] for n in names[: names.index(shard)])


def _check_rows(tensor: torch.Tensor, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise ValueError(f"the checkpoint holds {tensor.shape[0]} rows, the model wants {rows}")
