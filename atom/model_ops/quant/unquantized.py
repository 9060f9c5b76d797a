"""Weights in the activations' dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom.model_ops.quant.base import QuantMethod
from atom.model_ops.weights import copy_weight

if TYPE_CHECKING:
    from atom.model_ops.layer_context import LayerContext
    from atom.model_ops.linear import LinearBase


class UnquantizedLinearMethod:
    """`x @ weight.T + bias`, with the selected linear op."""

    def create_weights(self, layer: LinearBase, context: LayerContext) -> None:
        layer.weight = context.empty(layer.out_features, layer.in_features)
        layer.bias = context.empty(layer.out_features) if layer.has_bias else None
        self._linear = context.ops.resolve(
            "linear",
            context.dtype,
            in_features=layer.in_features,
            out_features=layer.out_features,
        )

    def load(self, layer: LinearBase, name: str, tensor: torch.Tensor, offset: int) -> None:
        parameter = layer.bias if name == "bias" else layer.weight
        assert parameter is not None
        copy_weight(parameter[offset : offset + tensor.shape[0]], tensor)

    def process_after_loading(self, layer: LinearBase) -> None:
        """Nothing to do."""

    def apply(self, layer: LinearBase, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._linear(x, layer.weight, layer.bias)
        return out


class UnquantizedConfig:
    """No layer is quantised."""

    def method_for(self, prefix: str) -> QuantMethod:
        return UnquantizedLinearMethod()
