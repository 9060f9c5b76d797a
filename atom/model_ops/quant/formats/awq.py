"""`quant_method: awq`: 4-bit weights of AutoAWQ, its `gemm` layout.

Source: AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from atom.config import ConfigError
from atom.model_ops.quant.base import (
    IN,
    OUT,
    Axis,
    Header,
    LayerKind,
    QuantConfig,
    QuantMethod,
    StoredTensor,
)
from atom.model_ops.quant.names import find_header, read_flag, read_names, same_for_all, spans
from atom.model_ops.quant.scales import scale_dtype
from atom.model_ops.quant.weights import QuantWeights, WeightFormat
from atom.model_ops.quant.words import (
    PER_WORD,
    Groups,
    read_group_size,
    read_layout,
    transpose_words,
    unpack_words,
)


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise ConfigError(f"quantization_config: AWQ with bits={bits!r} is not supported, only 4")
    read_layout(config, ("version", "format", "checkpoint_format"), ("gemm",))
    read_flag(config, "zero_point", (True,), True)
    size = read_group_size(config.get("group_size", config.get("q_group_size")))
    key = "modules_to_not_convert"
    ignored = read_names(key, config.get(key))
    return AwqConfig(Groups(size), ignored, bool(config.get("lm_head")), headers)


class AwqConfig:
    """All layers but those that `ignored` names; the head only if `has_head`.

    An entry is any number of consecutive components of a name, such as `mlp.gate`. AutoAWQ looks
    for the text alone, so its `gate` is in `gate_proj`, too: where there are weight files, the text
    does unless they have the layer's `qweight`.
    """

    def __init__(
        self,
        groups: Groups,
        ignored: Sequence[str],
        has_head: bool,
        headers: Mapping[str, Header],
    ) -> None:
        self._groups = groups
        self._ignored = ignored
        self._components = {entry.strip(".") for entry in ignored}
        self._has_head = has_head
        self._headers = headers
        self._find = lru_cache(maxsize=None)(self._format_of)

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind == "embedding" or (kind == "head" and not self._has_head):
            return None
        if same_for_all(prefix, parts, self._find) is None:
            return None
        return AwqMethod(self._groups, find_header(self._headers, prefix, parts, "scales"))

    def _format_of(self, name: str) -> str | None:
        if f"{name}.qweight" in self._headers:
            return "AWQ"
        if any(span in self._components for span in spans(name)):
            return None
        is_ignored = bool(self._headers) and any(text in name for text in self._ignored)
        return None if is_ignored else "AWQ"


class AwqMethod(QuantMethod):
    """`qweight` int32 [in, out / 8], `qzeros` int32 [in / group, out / 8], `scales` [in / group,
    out].
    """

    def __init__(self, groups: Groups, scale: Header | None) -> None:
        self._groups = groups
        self.format = WeightFormat("int4", 1, groups.columns, has_zeros=True)
        words = Axis("out", PER_WORD)
        self.stored = {
            "qweight": StoredTensor((IN, words), torch.int32),
            "qzeros": StoredTensor((groups.axis, words), torch.int32),
            "scales": StoredTensor((groups.axis, OUT), scale_dtype(scale), "numbers"),
        }

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        zeros = unpack_words(tensors["qzeros"], reordered=True).mT
        return QuantWeights(
            self.format,
            transpose_words(tensors["qweight"], reordered=True),
            self._groups.spread(tensors["scales"].mT, columns),
            self._groups.spread(zeros, columns),
        )
