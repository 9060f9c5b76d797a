"""`quant_method: mxfp4`: experts in MXFP4 as gpt-oss stores them, all in one tensor.

Source: gpt-oss' checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from atom.model_ops.quant.base import (
    OUT,
    Axis,
    Header,
    LayerKind,
    QuantConfig,
    QuantMethod,
    StoredTensor,
)
from atom.model_ops.quant.names import modules_above, read_names
from atom.model_ops.quant.weights import QuantWeights, WeightFormat

_GROUP = 32


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for names that are no list of strings.
    """
    del headers
    key = "modules_to_not_convert"
    return Mxfp4Config(frozenset(read_names(key, config.get(key))))


class Mxfp4Config:
    """Experts only; `ignored` modules, and all below them, are not quantised."""

    def __init__(self, ignored: AbstractSet[str]) -> None:
        self._ignored = ignored

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind != "experts":
            return None
        if any(module in self._ignored for module in modules_above(prefix)):
            return None
        return Mxfp4Method()


class Mxfp4Method(QuantMethod):
    """`gate_up_proj_blocks` uint8 [experts, out, in / 32, 16], gate and up rows in turns, and
    `gate_up_proj_scales` e8m0 [experts, out, in / 32]; `down_proj` likewise.
    """

    def __init__(self) -> None:
        self.format = WeightFormat("fp4", 1, _GROUP, "e8m0")
        groups = Axis("in", _GROUP)
        self.stored = {
            "blocks": StoredTensor(
                (OUT, groups, Axis("all", _GROUP // 2)), torch.uint8, gate_up_alternate=True
            ),
            "scales": StoredTensor((OUT, groups), torch.uint8, "exponents", gate_up_alternate=True),
        }

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        return QuantWeights(self.format, tensors["blocks"].flatten(-2), tensors["scales"])
