"""Triton as if there were a GPU: launches are looked up and listed, and nothing is compiled."""

from __future__ import annotations

from typing import Any

import torch

from atom.config import ConfigError
from atom.plan.rehearsal.meter import Meter
from atom.platform import Platform

_DEVICE = 0


class _Driver:
    """What the JIT asks of a driver."""

    def __init__(self, target: object) -> None:
        self._target = target

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, _device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class _Compiled:
    """In the place of a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, name: str, meter: Meter) -> None:
        self._name = name
        self._meter = meter

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        self._meter.launched("triton")
        self._meter.launches.kernels.add(self._name)


def list_launches(platform: Platform, meter: Meter) -> None:
    """From now on Triton's launches count, and their kernels are noted by name and what they
    specialise on; for the whole process, which runs no kernel.

    Raises:
        ConfigError: where there is no Triton that can be asked.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise ConfigError(
            f"a rehearsal asks Triton which kernels it would compile, and it cannot be imported "
            f"({error}): pip install triton, on Linux"
        ) from error
    if triton.knobs.runtime.interpret:
        raise ConfigError("a rehearsal lists compiled kernels; unset TRITON_INTERPRET")

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        compiled = _Compiled(f"{fn.name} {key}", meter)
        fn.jit_function.device_caches[_DEVICE][0][key] = compiled
        compiled.run()
        return True  # it is as good as compiled

    if platform.kind == "rocm":
        target = GPUTarget("hip", platform.arch, 64)
    else:
        target = GPUTarget("cuda", int(platform.arch.removeprefix("sm")), 32)
    triton.runtime.driver.set_active(_Driver(target))
    triton.knobs.runtime.jit_cache_hook = note
