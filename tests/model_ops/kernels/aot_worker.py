"""Compiles cases for one arch; run as a program, since an error inside LLVM ends the process.

    python aot_worker.py ARCH MODULE < names of cases, one a line

Ops run on CPU tensors under a driver that claims to be ARCH; a launch compiles what it would
launch. The outcome of each case goes to standard output, a line of JSON marked with `MARK`.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import aot_residency
import torch
import triton
from aot_case import MARK, PLATFORMS, Case
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import atom.platform
from atom.model_ops.kernels import probe
from atom.model_ops.registry import PACKED

_TARGETS = {
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "sm90": GPUTarget("cuda", 90, 32),
}
# All threads' stores are done before one thread counts the program, on an AMD GPU after the caches
# are written back; and no thread loads before the count is known, nor from caches of before.
_HANDOVERS = {
    "rocm": r"s_waitcnt vmcnt\(0\)\n(?:(?!.*_store_).*\n)*?\s*s_barrier\n(?:(?!.*_store_).*\n)*?"
    r"\s*buffer_wbl2 sc1\n\s*s_waitcnt vmcnt\(0\)\n\s*global_atomic_add .*\n"
    r"\s*s_waitcnt vmcnt\(0\)\n\s*buffer_inv sc1\n(?:(?!.*_load_).*\n)*?\s*s_barrier\n",
    "cuda": r"bar\.sync\s.*\n(?:(?!.*st\.global).*\n)*?.*atom\.global\.gpu\.acq_rel\.add\..*\n"
    r"(?:(?!.*ld\.global).*\n)*?\s*bar\.sync\s",
}
_RESIDENT: set[int] = set()
_MAX_GRID = (2**31 - 1, 65535, 65535)


class _Driver:
    """What the JIT asks of a driver before it compiles."""

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


class _NoHostReads(TorchDispatchMode):  # type: ignore[misc]
    """On a GPU such an operation waits for the device, and cannot be captured in a graph."""

    _READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in self._READS:
            raise RuntimeError(f"the op reads values of a tensor on the host ({func.name()})")
        return func(*args, **(kwargs or {}))


@contextmanager
def _captured(launches: dict[str, Any]) -> Iterator[None]:
    """Launches compile; `launches` gets the distinct compiled kernels by name."""
    stock = JITFunction.run
    seen: set[str] = set()

    def run(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        _check_grid(self, grid)
        compiled = stock(self, *args, grid=grid, **{**kwargs, "warmup": True})
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            name = self.fn.__name__
            same = sum(known.split("#")[0] == name for known in launches)
            launches[f"{name}#{same + 1}" if same else name] = compiled
        return compiled

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = stock


def _check_grid(kernel: Any, grid: Any) -> None:
    if callable(grid):
        return
    within = all(0 < size <= most for size, most in zip(grid, _MAX_GRID, strict=False))
    if not within or not all(isinstance(size, int) for size in grid):
        raise ValueError(f"{kernel.fn.__name__}: grid {grid} is not within {_MAX_GRID}")


def _aiter(arch: str) -> probe.Library:
    # Its adapters import kernels, which ask for the platform: not before `main` has said which.
    from fake_aiter import FakeAiter

    return FakeAiter(arch=arch).library


def compile_case(case: Case, arch: str) -> dict[str, Any]:
    query = case.query(PLATFORMS[arch])
    entry = case.entry()
    # A cache is packed for aiter's sake alone.
    with probe.replaced(_aiter(arch)) if case.layout == PACKED else nullcontext():
        reason = entry.supports(query)
    if reason is not None:
        return {"refused": reason}
    function = entry.load()
    calls = [arguments(query) for arguments in (case.arguments, *case.batches)]
    launches: dict[str, Any] = {}
    _RESIDENT.clear()
    with _captured(launches), _NoHostReads():
        function(*calls[0])
        known = set(launches)
        for arguments in calls[1:]:
            function(*arguments)
    if anew := ", ".join(set(launches) - known):
        raise ValueError(f"another batch launches other kernels: {anew}")
    measure = _measure_nvidia if arch.startswith("sm") else _measure_amd
    kernels = {name: measure(compiled, arch) for name, compiled in launches.items()}
    return {"kernels": kernels, "resident": sorted(_RESIDENT)}


def _record_residents() -> None:
    """What ops say that a unit runs side by side goes to `_RESIDENT`, too."""
    from atom.model_ops.kernels.triton import splits

    stock = splits.side_by_side

    def side_by_side(units: int, resident: int) -> int:
        _RESIDENT.add(resident)
        return stock(units, resident)

    splits.side_by_side = side_by_side


def _measure_amd(compiled: Any, arch: str) -> dict[str, int]:
    """Counts from the assembly; registers are vector registers, accumulators included."""
    text = compiled.asm["amdgcn"]

    def count(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        if found is None:
            raise LookupError(f"no .{key} in the assembly")
        return int(found[1])

    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    return {
        "registers": count("vgpr_count"),
        "scalar_registers": count("sgpr_count"),
        "spills": count("vgpr_spill_count"),
        "scalar_spills": count("sgpr_spill_count"),
        "scratch_bytes": count("private_segment_fixed_size"),
        "shared_bytes": shared,
        "warps": warps,
        **aot_residency.amd(arch, count("vgpr_count"), warps, shared),
        "matrix_instructions": len(re.findall(r"^\s*v_mfma_", text, re.MULTILINE)),
        "handovers": _handovers(text, "rocm"),
    }


def _measure_nvidia(compiled: Any, _arch: str) -> dict[str, int]:
    """Counts from the binary; registers that are spilled lie on the thread's stack."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    ptx = compiled.asm["ptx"]
    return {
        "registers": found["REG"],
        "spills": -(-found["STACK"] // 4),
        "scratch_bytes": found["STACK"],
        "shared_bytes": shared,
        "warps": warps,
        **aot_residency.nvidia(found["REG"], warps, shared),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        "warp_group_instructions": ptx.count("wgmma.mma_async"),
        "handovers": _handovers(ptx, "cuda"),
    }


def _handovers(text: str, kind: str) -> int:
    """How often one program may read what others stored, of assembly with comments and places."""
    lines = (line.partition(";")[0] if kind == "rocm" else line for line in text.splitlines())
    code = (line.strip() for line in lines if ".loc" not in line)
    return len(re.findall(_HANDOVERS[kind], "".join(f"{line}\n" for line in code if line)))


def main(arch: str, module: str) -> None:
    torch.set_num_threads(1)
    # Before any kernel module is imported: those may ask for the platform then.
    atom.platform.current_platform = lambda: PLATFORMS[arch]
    triton.runtime.driver.set_active(_Driver(_TARGETS[arch]))
    _record_residents()
    cases = {case.name: case for case in importlib.import_module(module).CASES}
    for line in sys.stdin:
        try:
            outcome = compile_case(cases[line.rstrip("\n")], arch)
        except Exception:
            outcome = {"error": traceback.format_exc(limit=-12)}
        print(MARK + json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
