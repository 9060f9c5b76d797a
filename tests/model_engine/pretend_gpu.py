"""An engine that starts as on a GPU, on CPU tensors: Triton's launches do all but run.

For programs that count or time what the host does, and that import this before kernels. Triton
looks up each launch among its compiled kernels as ever; one that it has not compiled yet is noted
in `Launches.compiled` instead. What kernels would write is zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import atom.platform
from atom.platform import Platform, cpu_platform

_TARGETS = {"gfx942": GPUTarget("hip", "gfx942", 64), "sm90": GPUTarget("cuda", 90, 32)}
_UNITS = {"gfx942": 304, "sm90": 132}
ARCHS = tuple(_TARGETS)
# Their functions are compiled, or not there.
_LIBRARIES = ("aiter", "flash_mla")


class _Driver:
    """What the JIT asks of a driver."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)

    def get_current_stream(self, _device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Launches:
    """Triton's, from `pretend_gpu` on.

    Attributes:
        count: how many there were.
        compiled: names and keys of the kernels that were compiled for them, in order.
    """

    def __init__(self) -> None:
        self.count = 0
        self.compiled: list[tuple[str, str]] = []

    def install(self) -> None:
        launches = self

        class Compiled:
            """In the place of a compiled kernel."""

            function = packed_metadata = None

            @staticmethod
            def launch_metadata(*_: object) -> None:
                return None

            @staticmethod
            def run(*_: object) -> None:
                launches.count += 1

        def compile_kernel(kernel: Any, key: str, *_: Any) -> Any:
            launches.compiled.append((kernel.fn.__name__, key))
            cache = kernel.device_caches[triton.runtime.driver.active.get_current_device()][0]
            cache[key] = Compiled()
            return cache[key]

        JITFunction._do_compile = compile_kernel


class CaptureCounter:
    """A capture backend: work runs twice, as for a CUDA graph, and again for each replay."""

    def __init__(self) -> None:
        self.count = 0

    def capture(self, work: Any) -> Any:
        self.count += 1
        work()
        work()
        return work


def pretend_gpu(arch: str, backend: Any) -> Launches:
    """Kernels are chosen for a GPU; what asks for a device gets the CPU.

    Args:
        arch: one of `ARCHS`.
        backend: captures the graphs.
    """
    gpu = Platform("cuda" if arch.startswith("sm") else "rocm", arch, True)
    # Before any kernel module is imported: those may ask for the platform then.
    atom.platform.current_platform = lambda: gpu  # type: ignore[assignment]
    atom.platform.num_compute_units = lambda *_: _UNITS[arch]
    for name in ("free_memory_bytes", "total_memory_bytes"):
        of_cpu = partial(getattr(atom.platform, name), cpu_platform())
        setattr(atom.platform, name, lambda _, of_cpu=of_cpu: of_cpu())
    triton.runtime.driver.set_active(_Driver(_TARGETS[arch]))
    from atom.model_engine import rank_parts
    from atom.model_engine.step import planned_graphs
    from atom.model_ops.layer_context import LayerContext
    from atom.model_ops.op_table.ops import OPS
    from atom.model_ops.registry import OpTable

    ops = {op: tuple(e for e in found if e.name not in _LIBRARIES) for op, found in OPS.items()}

    def create(
        dtype: torch.dtype, context_len: int, _: Platform, group: Any, batch_invariant: bool
    ) -> LayerContext:
        table = OpTable(gpu, ops, batch_invariant)
        return LayerContext(dtype, torch.device("cpu"), table, context_len, group)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (LayerContext, "create", create),
        (rank_parts, "create_recorder", lambda _: None),
        (planned_graphs, "capture_backend", lambda _: backend),
    )
    for owner, name, value in replaced:
        setattr(owner, name, value)
    _fill_empty_tensors()
    torch.mm = _mm(torch.mm)
    launches = Launches()
    launches.install()
    return launches


def _fill_empty_tensors() -> None:
    """What no kernel writes is zero, so that it is a token, an expert, a row."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, _zeroed(getattr(owner, name)))


def _zeroed(create: Any) -> Any:
    def empty(*args: Any, **options: Any) -> Any:
        out = create(*args, **options)
        return out if out.is_meta else out.zero_()

    return empty


def _mm(stock: Any) -> Any:
    """Of 16-bit numbers with sums of 32, which torch has on GPUs alone: zeros."""

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, **options: Any) -> Any:
        if out_dtype is None:
            return stock(a, b, **options)
        return a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    return mm


def write_models(folder: Path, models: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Folders of `target` and, if there is one, of `draft`, as engine options."""
    names = {"target": "model", "draft": "draft_model"}
    for name, fields in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
    return {names[name]: str(folder / name) for name in models}


def start_engine(models: Mapping[str, str], **options: Any) -> tuple[Any, Any]:
    """A worker that has captured its graphs, and its rank; it has not warmed up."""
    from atom.model_engine import worker
    from atom.model_engine.arg_utils import engine_config

    ranks: list[Any] = []
    worker.__dict__["log_start"] = lambda rank, *_: ranks.append(rank)
    given = {"load_format": "dummy", "device": "cpu", "num_threads": 1, "overlap": True}
    config = engine_config(**models, **given, **options)
    return worker.Worker(config), ranks[0]
