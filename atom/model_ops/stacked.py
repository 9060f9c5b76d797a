"""Weights of a product, loaded from one or several of a checkpoint's matrices.

`load_weight` copies each matrix to its rows, and quantised ones are converted after loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.base import LayerKind, SplitsLayers
from atom.model_ops.quant.inputs import resolve_product, take_weights
from atom.model_ops.quant.storage import MatrixStorage, Part, SplitStorage
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
        self.storage = self._create_storage(context, prefix, kind, bias)
        bias = bias and not self.storage.is_split
        self.in_features = self.storage.columns
        self.out_features = sum(self.storage.rows)
        if bias or "bias" not in self.storage.stored:
            self.bias = context.empty(self.out_features) if bias else None
        self._dtype = context.dtype

    def _create_storage(
        self, context: LayerContext, prefix: str, kind: LayerKind, has_bias: bool
    ) -> MatrixStorage:
        names = part_names(prefix, self.parts)
        matrices = tuple(self.parts.values())
        if isinstance(context.quant, SplitsLayers) and context.quant.splits(names):
            return SplitStorage(matrices, context.device)
        method = context.quant.method_for(prefix, names, kind)
        try:
            return MatrixStorage(self, matrices, method, context, has_bias=has_bias)
        except ValueError as error:
            raise ValueError(f"{prefix}: {error}") from error

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load tensor `name` of the checkpoint's matrix `shard`; None if there is only one, or for
        one of all matrices, which the checkpoint stacks, too.
        """
        if shard is None and len(self.parts) > 1 and not self.storage.is_split:
            self._load_stacked(name, tensor)
            return
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

    def stored_in(self, name: str) -> tuple[str | None, ...]:
        """The matrices whose tensors `name`, one behind another, are the parameter bit by bit; none
        where it is made of them otherwise.
        """
        is_bias = name == "bias" and "bias" not in self.storage.stored
        return () if is_bias or not self.storage.is_as_stored(name) else tuple(self.parts)

    def _load_stacked(self, name: str, tensor: torch.Tensor) -> None:
        """Load each matrix' part of one tensor of all."""
        try:
            matrices = self.storage.unstacked(name, tensor)
        except ValueError as error:
            held = ", ".join(str(part) for part in self.parts)
            raise ValueError(f"{error}: those of {held}") from None
        for shard, matrix in zip(self.parts, matrices, strict=True):
            self.load_weight(name, matrix, shard)

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

    def prepared_from(self) -> str:
        """All that the prepared weights depend on besides the checkpoint's tensors and the code;
        "" if there are none.
        """
        if self.storage.format is None:
            return ""
        return f"{self.choice.name} {self.choice.query} {self.storage.describe()}"

    @property
    def prepared(self) -> tuple[Any, ...]:
        """What the op's `prepare` made."""
        return (self._prepared,)

    def restore(self, prepared: tuple[Any, ...]) -> frozenset[str]:
        """Take what was prepared before, from the same tensors -> the parameters that need not be
        loaded, and are deleted.
        """
        (self._prepared,) = prepared
        return self.storage.drop()

    def process_after_loading(self) -> None:
        if self.storage.format is None or self._prepared is not None:
            return
        self._prepared = take_weights(self.storage, self.choice)
        if self.choice.prepare is not None:
            self._prepared = self.choice.prepare(self._prepared, self._dtype)


class DequantisedMatrix(StackedMatrix):
    """Weights that are read otherwise than by a product with a layer's input.

    Quantised ones are dequantised once, after loading.
    """

    def process_after_loading(self) -> None:
        if self.storage.format is None:
            return
        weight = dequantise(self.storage.take(), self._dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)


def part_names(prefix: str, parts: Iterable[str | None]) -> list[str]:
    """The checkpoint's modules that layer `prefix` stacks; none if it is one itself."""
    parent = prefix.rpartition(".")[0]
    return [f"{parent}.{part}".lstrip(".") for part in parts if part is not None]
