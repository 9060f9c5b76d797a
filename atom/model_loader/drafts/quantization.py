"""Reads how a draft's weights are quantised, whatever its target's are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from atom.model_loader.checkpoint import has_weights, list_tensors
from atom.model_loader.quantization import read_quantization
from atom.model_loader.safetensors.reader import CheckpointTensor
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.base import LayerKind, QuantConfig, QuantMethod, UnquantizedConfig
from atom.model_ops.quant.formats.online import OnlineConfig
from atom.models.config.file import read_json_object

_NUMBERS = ("F64", "F32", "F16", "BF16")


Renames = Sequence[tuple[str, str]]


def read_draft_quantization(
    folder: Path, with_weights: bool, renames: Renames
) -> QuantConfig | None:
    """The quantisation of a draft's checkpoint; None if it has none.

    Args:
        renames: as `WeightMapping.renames`.

    Raises:
        ConfigError: when it is not supported, naming the key.
        WeightError: when a weight file is damaged.
    """
    raw = read_json_object(folder / "config.json")
    config = read_quantization(folder, raw, with_weights)
    if isinstance(config, UnquantizedConfig):
        return None
    tensors = list_tensors(folder) if with_weights and has_weights(folder) else []
    return DraftQuantization(config, tensors, renames)


def online_for_draft(asked: str, target: QuantConfig, context: LayerContext) -> QuantConfig:
    """How an unquantised draft is quantised when it is loaded.

    Args:
        asked: its `quantization`. With "auto" it becomes int8 on a CPU, where reading its weights
            is a part of every step, unless the target's are float32.
    """
    if asked not in ("auto", "none"):
        return OnlineConfig(asked)
    is_exact = context.dtype is torch.float32 and isinstance(target, UnquantizedConfig)
    if asked == "none" or is_exact or context.ops.platform.is_gpu:
        return UnquantizedConfig()
    return OnlineConfig("int8")


class DraftQuantization:
    """Asks by the names of the checkpoint's tensors, such as `model.layers.0` for `midlayer`.

    Lists of excluded modules may have yet other names; what is stored as numbers is not quantised.
    """

    def __init__(
        self, config: QuantConfig, tensors: Iterable[CheckpointTensor], renames: Renames
    ) -> None:
        self._config = config
        self._stored_names: dict[str, str] = {}
        self._in_numbers: set[str] = set()
        for tensor in tensors:
            name = _renamed(tensor.name, renames)
            module = name.partition(".")[0]
            self._stored_names[module] = tensor.name.removesuffix(name.removeprefix(module))
            if tensor.dtype in _NUMBERS and name.endswith(".weight"):
                self._in_numbers.add(name.removesuffix(".weight"))

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if self._in_numbers.issuperset(parts or (prefix,)):
            return None
        names = [self._stored_name(part) for part in parts]
        return self._config.method_for(self._stored_name(prefix), names, kind)

    def _stored_name(self, name: str) -> str:
        module, dot, rest = name.partition(".")
        return f"{self._stored_names.get(module, module)}{dot}{rest}"


def _renamed(name: str, renames: Renames) -> str:
    """The name in the model of a checkpoint's tensor."""
    for old, new in renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
