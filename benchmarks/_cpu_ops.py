"""The ops of one step, each alone: how often, how long, how many bytes and operations."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from _decode_engine import DecodeEngine
from torch import nn

from atom.kv_cache.builders import attention_layers
from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels.native.program import Arena, record
from atom.model_ops.kernels.native.recorder import NotRecordableError
from atom.model_ops.linear import LinearBase
from atom.model_ops.rotary import AttentionInputs

_REPEATS = 7
# Read before every run, so that no cache holds the weights: more than any processor's.
_EVICTING_BYTES = 1 << 30


@dataclass
class Op:
    """The same op in all layers.

    Attributes:
        calls: what a step computes, in order; together they read more than a cache holds.
        num_bytes: of all calls: weights as they are held, keys and values, inputs and outputs.
        operations: of all calls, by the kind of number.
        seconds: of all calls.
    """

    name: str
    calls: list[Callable[[], torch.Tensor]] = field(default_factory=list)
    num_bytes: int = 0
    operations: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, call: Callable[[], torch.Tensor], num_bytes: int, kind: str, count: int) -> None:
        self.calls.append(call)
        self.num_bytes += num_bytes
        self.operations[kind] = self.operations.get(kind, 0.0) + count


@torch.inference_mode()
def ops_of(engine: DecodeEngine) -> list[Op]:
    """Time the products, the attention and the output head of the engine's last step."""
    ops = _captured(engine)
    for op in ops:
        op.seconds = _seconds(op.calls)
    return ops


@torch.inference_mode()
def operations_of(engine: DecodeEngine) -> dict[str, float]:
    """Of the engine's last step, by the kind of number, nothing timed."""
    total: dict[str, float] = {}
    for op in _captured(engine):
        for kind, count in op.operations.items():
            total[kind] = total.get(kind, 0.0) + count
    return total


def _captured(engine: DecodeEngine) -> list[Op]:
    """Computes the last step again: keys and values are written where they are already."""
    model = engine.model
    ops: dict[str, Op] = {}
    attention = set(attention_layers(model).values())
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) or module in attention:
            op = ops.setdefault(_short(name), Op(_short(name)))
            hooks.append(module.register_forward_hook(_hook(op, engine), with_kwargs=True))
    step = engine.inputs.build(engine.last_batch)
    output = model(step.model_input)
    for hook in hooks:
        hook.remove()
    rows = output.at(step.sample.logits_indices)
    ops["output head"] = Op("output head")
    head = model.output_head
    module = head if isinstance(head, nn.Module) and _held(head) else model.token_embedding
    logits = model.compute_logits(rows)
    num_bytes = _held(module) + _size(rows) + _size(logits)
    count = 2 * rows.shape[0] * rows.shape[1] * logits.shape[1]
    ops["output head"].add(
        lambda: model.compute_logits(rows), num_bytes, _kind(module, rows), count
    )
    # Not those within a layer, which computes them itself.
    return [op for op in ops.values() if op.calls]


def _hook(op: Op, engine: DecodeEngine) -> Callable[..., None]:
    def hook(
        module: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], out: torch.Tensor
    ) -> None:
        def call() -> torch.Tensor:
            return module.forward(*given, **named)  # type: ignore[no-any-return]

        tensors = [x for x in (*given, *named.values(), out) if isinstance(x, torch.Tensor)]
        tensors += [x.positions for x in given if isinstance(x, AttentionInputs)]
        moved = sum(map(_size, tensors))
        rows = tensors[0].shape[0]
        if isinstance(module, LinearBase):
            count = 2 * rows * module.in_features * module.out_features
            op.add(call, _held(module) + moved, _kind(module, tensors[0]), count)
            return
        cache: Any = module.kv_cache
        if isinstance(cache, KVCacheTensor):
            token = _size(cache.key[0, 0]) + _size(cache.value[0, 0])
            width = tensors[0][0].numel()
        else:
            token = _size(cache.latent[0, 0])
            width = tensors[0].shape[1] * cache.latent.shape[-1]
        sequences = engine.last_batch.sequences
        cached = sum(s.context_len for s in sequences)
        # Each row attends to what is before it.
        pairs = sum(
            n * (s.context_len - (n - 1) / 2) for s in sequences for n in [len(s.token_ids)]
        )
        op.add(call, cached * token + moved, _dtype(tensors[0]), int(4 * pairs * width))

    return hook


def _seconds(calls: list[Callable[[], torch.Tensor]]) -> float:
    """The shortest of several runs of all calls, recorded where they can be."""

    def work() -> list[torch.Tensor]:
        return [call() for call in calls]

    replay: Callable[[], object] = work
    kept = work()
    try:
        kept, program = record(work, lambda found: found, Arena())
        replay = program.replay
    except NotRecordableError:
        pass
    evicting = torch.ones(_EVICTING_BYTES // 4)
    found = []
    for _ in range(_REPEATS):
        evicting.sum()
        started = time.perf_counter()
        replay()
        found.append(time.perf_counter() - started)
    del kept
    return min(found)


def _short(name: str) -> str:
    return ".".join(part for part in re.sub(r"\.\d+\.", ".", name).split(".")[-2:])


def _held(module: nn.Module) -> int:
    """Bytes of weights, quantised ones as the op reads them."""
    quantised = (int(getattr(part, "quantised_bytes", 0)) for part in module.modules())
    return sum(map(_size, module.parameters())) + sum(quantised)


def _kind(module: nn.Module, x: torch.Tensor) -> str:
    """The numbers that are multiplied: packed integers where the weights are held as such."""
    return "int8" if _is_packed(module, x) else _dtype(x)


def _is_packed(module: nn.Module, x: torch.Tensor) -> bool:
    features = getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
    return 0 < _held(module) < features * x.element_size()


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
