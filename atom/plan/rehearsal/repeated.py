"""Equal decoder layers of a step: two of them run, and each of the others counts as the second."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from atom.model_ops.registry import OpChoice
from atom.models.llama import LlamaDecoderLayer
from atom.plan.rehearsal.meter import Meter
from atom.plan.rehearsal.registry import kind_of

# What a layer's forward pass returns of its arguments, made anew.
Output = Callable[[tuple[Any, ...]], torch.Tensor]


@dataclass(frozen=True)
class _Run:
    """Attributes:
    launches: by library.
    peak: bytes beside what lived before.
    outputs: each from the arguments.
    """

    launches: Counter[str]
    peak: int
    outputs: tuple[Output, ...]


@dataclass
class _Step:
    """Runs of one step by kind of layer and shapes of arguments; None of what ran but once.

    Attributes:
        metadata: of its attention, which knows the lengths.
    """

    metadata: weakref.ref[Any]
    runs: dict[object, _Run | None] = field(default_factory=dict)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]


class RepeatedLayers:
    """Of layers that are equal but for their numbers, the first in a step may make what all share,
    such as lists of work; the second runs as all after it, which are not run.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._step: _Step | None = None

    def count(self, layers: Iterable[nn.Module]) -> None:
        """From now on calls of these decoder layers count so."""
        for layer in layers:
            layer.forward = partial(self._forward, layer.forward, _kind_of_layer(layer))

    def _forward(self, forward: Callable[..., Any], kind: object, *args: Any) -> Any:
        """Args: as `LlamaDecoderLayer.forward`."""
        x, residual, (positions, metadata, rotary), *rows = args
        step = self._step
        if step is None or step.metadata() is not metadata:
            step = self._step = _Step(weakref.ref(metadata))
        key = kind, id(rotary), *(kind_of(each) for each in (x, residual, positions, *rows))
        run = step.runs.get(key)
        if run is not None:
            return self._repeat(run, args)
        if key not in step.runs:
            step.runs[key] = None
            return forward(*args)
        out, step.runs[key] = self._record(forward, args)
        return out

    def _repeat(self, run: _Run, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        meter = self._meter
        meter.launches.by_library.update(run.launches)
        meter.peak = max(meter.peak, meter.live + run.peak)
        return tuple(make(args) for make in run.outputs)

    def _record(
        self, forward: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[tuple[torch.Tensor, ...], _Run]:
        meter = self._meter
        launched, live, peak = meter.launches.by_library.copy(), meter.live, meter.peak
        held = meter.held()
        meter.peak = live
        out: tuple[torch.Tensor, ...] = forward(*args)
        own, meter.peak = meter.peak - live, max(peak, meter.peak)
        launches = meter.launches.by_library - launched
        return out, _Run(launches, own, tuple(_output(each, args, held) for each in out))


def _output(tensor: torch.Tensor, args: tuple[Any, ...], held: set[int]) -> Output:
    """An argument, what is there in every step, or a new one of the same shape."""
    for place, arg in enumerate(args):
        if arg is tensor:
            return lambda given: given[place]
    if tensor.untyped_storage()._cdata in held:
        return lambda _: tensor
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    return lambda _: torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _kind_of_layer(layer: nn.Module) -> object:
    """What its work depends on: its modules with their numbers, weights, and chosen ops."""
    return tuple((name, *_kind_of_module(module)) for name, module in layer.named_modules())


def _kind_of_module(module: nn.Module) -> tuple[object, ...]:
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    own = ((name, value) for name, value in vars(module).items() if name != "training")
    return (
        type(module),
        *((name, kind_of(tensor)) for name, tensor in tensors),
        *((name, value) for name, value in own if isinstance(value, bool | int | float | str)),
        *(
            (name, value.op, value.name, repr(value.query))
            for name, value in vars(module).items()
            if isinstance(value, OpChoice)
        ),
    )
