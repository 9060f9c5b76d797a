"""Says in a few words how a model's weights are stored and its inputs rounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from atom.model_ops.moe import FusedMoE
from atom.model_ops.quant.base import QuantConfig
from atom.model_ops.quant.formats.gguf import TYPES, GgufConfig
from atom.model_ops.quant.weights import WeightFormat
from atom.model_ops.registry import OpChoice
from atom.model_ops.stacked import PreparedMatrix


def describe_weights(model: nn.Module, quantization: QuantConfig) -> str:
    """Such as `Q4_1 weights, inputs rounded to int8`; "" if none is quantised.

    Of several formats and roundings, those of most layers come first.
    """
    names: dict[WeightFormat, str] = {}
    if isinstance(quantization, GgufConfig):
        for name in dict.fromkeys(quantization.types.values()):
            form = TYPES[name]
            names[form] = f"{names[form]} and {name}" if form in names else name
    formats, inputs = Counter[str](), Counter[str]()
    for choice in _choices(model):
        if choice.query.weights is None:
            continue
        form = choice.query.weights
        stored = replace(form, activations=None)
        formats[names.get(stored) or str(stored).removesuffix(" weight-only")] += 1
        rounded = "as they are" if form.activations is None else f"rounded to {form.activations}"
        inputs[rounded + (", dequantised when loaded" if choice.dequantises else "")] += 1
    if not formats:
        return ""
    return f"{_listed(formats)} weights, inputs {_listed(inputs)}"


def _choices(model: nn.Module) -> Iterator[OpChoice]:
    for module in model.modules():
        if isinstance(module, PreparedMatrix):
            if module.storage.format is not None:
                yield module.choice
        elif isinstance(module, FusedMoE):
            yield module.choice


def _listed(counts: Counter[str]) -> str:
    return " and ".join(name for name, _ in counts.most_common())
