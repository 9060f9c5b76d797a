"""What this processor can do at best: read memory, and multiply matrices of many rows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from _decode_shapes import SHAPES, write_configs
from _reads import Memory

from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import fill_with_dummy_weights
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import ReplicatedLinear
from atom.model_ops.quant.base import QuantConfig
from atom.platform import cpu_platform

_READ_BYTES = 512 << 20
_SIZE = 2048
_ROWS = 512
_REPEATS = 5
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

Call = Callable[[], object]


@dataclass(frozen=True)
class Limits:
    """Attributes:
    bandwidth: bytes/s that are read, by number of threads.
    ours, torchs: operations/s of products, by kind of number; a multiplication and an addition
        are two.
    """

    bandwidth: Mapping[int, float]
    ours: Mapping[str, float]
    torchs: Mapping[str, float]

    @property
    def bytes_per_s(self) -> float:
        return max(self.bandwidth.values())

    def operations_per_s(self, kind: str) -> float:
        """The better of ours and torch's."""
        return max(self.ours.get(kind, 0.0), self.torchs.get(kind, 0.0))

    def seconds(self, num_bytes: float, operations: Mapping[str, float]) -> float:
        """The least time: that of the bytes or of the operations, whichever is longer."""
        computing = sum(n / self.operations_per_s(kind) for kind, n in operations.items())
        return max(num_bytes / self.bytes_per_s, computing)


def measure_limits(threads: int) -> Limits:
    bandwidth = {n: _read_speed(n) for n in sorted({1, threads})}
    torch.set_num_threads(threads)
    ours, torchs = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = (torch.randn(n, _SIZE).to(dtype) for n in (_ROWS, _SIZE))
        torchs[_NAMES[dtype]] = _product_speed(partial(F.linear, x, weight))
        ours[_NAMES[dtype]] = _our_speed(dtype, None)
    ours["int8"] = _our_speed(torch.bfloat16, "int8")
    codes = [torch.randint(-128, 128, (n, _SIZE), dtype=torch.int8) for n in (_ROWS, _SIZE)]
    torchs["int8"] = _product_speed(lambda: torch._int_mm(codes[0], codes[1].t()))
    return Limits(bandwidth, ours, torchs)


def best_seconds(call: Call, repeats: int = _REPEATS) -> float:
    """The shortest of several runs after one that warms up."""
    call()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


def _read_speed(threads: int) -> float:
    memory = Memory(threads, _READ_BYTES)
    return memory.num_bytes / best_seconds(memory.read)


def _product_speed(call: Call) -> float:
    return 2 * _ROWS * _SIZE * _SIZE / best_seconds(call)


def _our_speed(dtype: torch.dtype, quantization: str | None) -> float:
    """Of the layer that a model of these weights would have."""
    context = LayerContext.create(dtype, 64, cpu_platform())
    if quantization is not None:
        context = replace(context, quant=_quantised(quantization))
    layer = ReplicatedLinear(_SIZE, _SIZE, False, context, "layer")
    fill_with_dummy_weights(layer)
    layer.process_after_loading()
    x = torch.randn(_ROWS, _SIZE).to(dtype)
    with torch.inference_mode():
        return _product_speed(lambda: layer(x))


def _quantised(name: str) -> QuantConfig:
    with tempfile.TemporaryDirectory() as folder:
        target, _ = write_configs(Path(folder), SHAPES["tiny"], 64)
        options = ModelOptions(str(target), load_format="dummy", quantization=name)
        return resolve_model(options).quantization
