"""Checks that configuration, weight files and memory fit together, before allocating.

A model is built on the meta device and compared with the headers of the weight files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from atom.config import ConfigError
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.placement import Placement, find_targets, place_tensors, raise_if_any
from atom.model_loader.safetensors.reader import CheckpointTensor
from atom.model_loader.source import ModelSource
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.base import UnquantizedConfig
from atom.model_ops.registry import OpUnavailableError
from atom.model_ops.rotary import RotaryEmbedding
from atom.model_ops.weight_mapping import converts_weights, loads_weights
from atom.models.base import CausalLM
from atom.models.eagle3.sharing import SharingDraft
from atom.models.layers.mtp import PredictionLayers
from atom.platform import cpu_platform, free_memory_bytes, total_memory_bytes
from atom.torch_start import with_meta_functions

M = TypeVar("M", CausalLM, SharingDraft, PredictionLayers)

_META = torch.device("meta")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
# Memory while the rotary table is built, in multiples of the table.
_ROTARY_COPIES = 4
_GB = 1e9


def check_fit(
    create: Callable[[LayerContext], M],
    tensors: Sequence[CheckpointTensor] | None,
    source: ModelSource,
    context: LayerContext,
) -> None:
    """Refuse a model that does not match its weight files or does not fit in memory.

    Args:
        create: builds the model; called once, with a context on the meta device.
        tensors: of the weight files; None for dummy weights.

    Raises:
        ConfigError: when the configuration cannot be built, or needs more memory than there is.
        WeightError: for tensors that are missing, unexpected or of a wrong shape.
    """
    if tensors is not None:
        _check_layers(tensors, source)
    sketch = create_sketch(create, source, context)
    if tensors is not None:
        targets = find_targets(sketch)
        placements = place_tensors(tensors, sketch.weight_mapping, targets, source.path)
        _check_shapes(placements, source)
    _check_memory(sketch, source, context, is_dummy=tensors is None)


def _check_layers(tensors: Sequence[CheckpointTensor], source: ModelSource) -> None:
    """Report missing layers by number, instead of by the names of all their tensors. In models of
    transformers' classes a layer may be counted as two.
    """
    if source.implementation is not None and source.implementation.kind == "transformers":
        return
    numbers = [int(match[1]) for tensor in tensors if (match := _LAYER.fullmatch(tensor.name))]
    stated = source.hf_config.get_text_config().num_hidden_layers
    if numbers and max(numbers) + 1 < stated:
        raise WeightError(
            f"{source.path / 'config.json'}: num_hidden_layers={stated}, and the weight files "
            f"hold {max(numbers) + 1} layers"
        )


def create_sketch(
    create: Callable[[LayerContext], M], source: ModelSource, context: LayerContext
) -> M:
    """Build the model on the meta device.

    Raises:
        ConfigError: when the configuration describes no model that can be built, naming it.
        OpUnavailableError: when no implementation computes one of its layers.
    """
    try:
        on_meta = dataclasses.replace(context, device=_META, max_model_len=1)
        return with_meta_functions(lambda: create(on_meta))
    except (ConfigError, OpUnavailableError):
        raise
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RuntimeError) as e:
        raise ConfigError(
            f"{source.path / 'config.json'} describes no model that can be built: "
            f"{type(e).__name__}: {e}"
        ) from e


def _check_shapes(placements: Sequence[Placement], source: ModelSource) -> None:
    problems = []
    for placement in placements:
        tensor = placement.tensor
        dtype = tensor.torch_dtype
        if dtype is None:
            problems.append(f"{tensor.name} is stored as {tensor.dtype}, which is not supported")
            continue
        if 0 in tensor.shape:
            problems.append(f"{tensor.name} {list(tensor.shape)} of {tensor.dtype} holds no values")
            continue
        try:
            values = _valueless(tensor.shape, dtype)
            with_meta_functions(partial(placement.copy, values))
        except (ValueError, LookupError, RuntimeError) as error:
            problems.append(f"{tensor.name} {list(tensor.shape)}: {error}")
    if problems:
        listed = name_some(problems, separator="; ")
        raise_if_any([f"wrong tensors ({len(problems)}): {listed}"], source.path)


@lru_cache(maxsize=256)
def _valueless(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Kept, since a checkpoint has thousands of tensors of few shapes."""
    return torch.empty(shape, dtype=dtype, device=_META)


class WeightBytes(NamedTuple):
    """Attributes:
    stored: when the weights are loaded, quantised ones as codes and scales.
    peak: while layers are dequantised, where they are.
    held: after that.
    """

    stored: int
    peak: int
    held: int


def weight_bytes(sketch: nn.Module) -> WeightBytes:
    """What the weights of a model on the meta device will take.

    Layers are dequantised one after another, and give up their stored weights only then.
    """
    stored = sum(_bytes(module) for module in sketch.modules())
    held = peak = stored
    for module in sketch.modules():
        own = _bytes(module)
        if converts_weights(module) and module.dequantised_bytes:
            held += module.dequantised_bytes
            peak = max(peak, held)
            held -= own
    return WeightBytes(stored, peak, held)


def _bytes(module: nn.Module) -> int:
    """Of a module's own parameters, and of its weights that are buffers."""
    tensors: list[torch.Tensor] = list(module.parameters(recurse=False))
    buffers = module.buffers(recurse=False)
    if loads_weights(module):
        tensors += buffers
    return sum(tensor.nbytes for tensor in tensors)


def _check_memory(
    sketch: nn.Module, source: ModelSource, context: LayerContext, is_dummy: bool
) -> None:
    """Checkpoints are compared with total memory, since more can be freed; dummy weights, whose
    size is unverified, with free memory.
    """
    platform = context.ops.platform
    stored, peak, _ = weight_bytes(sketch)
    room = free_memory_bytes(platform) if is_dummy else total_memory_bytes(platform)
    if peak > room:
        dtype = str(context.dtype).removeprefix("torch.")
        how = f"in {dtype}"
        if peak > stored:
            how = f"as stored, up to {_gb(peak)} while layers are dequantised to {dtype}"
        elif not isinstance(context.quant, UnquantizedConfig):
            how = f"as stored, those that are not quantised in {dtype}"
        raise ConfigError(
            f"{source.path / 'config.json'} describes a model whose parameters take {_gb(stored)} "
            f"{how}, and the {platform.kind} has {_gb(room)}"
        )
    tables = [m.cos_sin for m in sketch.modules() if isinstance(m, RotaryEmbedding)]
    table_bytes = sum(table.nbytes for table in tables) * context.max_model_len
    free = free_memory_bytes(cpu_platform())
    if table_bytes * _ROTARY_COPIES > free:
        raise ConfigError(
            f"{source.path / 'config.json'}: rotating {context.max_model_len} positions takes "
            f"tables of {_gb(table_bytes)}, and making them {_ROTARY_COPIES} times that; "
            f"{_gb(free)} are free. Pass a smaller --max-model-len"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / _GB:.1f} GB"
