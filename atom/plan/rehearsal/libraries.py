"""Which libraries a rehearsal pretends to find, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atom.config import ConfigError
from atom.model_ops.kernels.probe import Library
from atom.plan.gpus import Gpu
from atom.plan.rehearsal.meter import Meter
from atom.plan.rehearsal.pretended_aiter import pretended_aiter

# What can be pretended, and what a recipe installs of it, by kind of platform.
KNOWN: Mapping[str, tuple[str, ...]] = {
    "rocm": ("aiter", "flydsl", "hipcc"),
    "cuda": ("flash_mla",),
}


def check_names(names: Sequence[str], gpu: Gpu) -> frozenset[str]:
    """Raises:
    ConfigError: for what no kernel for this GPU asks for.
    """
    known = KNOWN[gpu.kind]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"--installed {' '.join(unknown)}: what kernels for {gpu.name} ask for is "
            f"{', '.join(known)}"
        )
    return frozenset(names)


def pretended_library(gpu: Gpu, installed: frozenset[str], meter: Meter) -> Library:
    """What `probe.replaced` takes."""
    contents: dict[str, Mapping[str, Any]] = {}
    if "aiter" in installed:
        contents["aiter"] = pretended_aiter(
            gpu.arch, gpu.compute_units, "flydsl" in installed, meter
        )
    if "flash_mla" in installed:
        contents["flash_mla"] = _flash_mla(meter)

    def load(module: str) -> Mapping[str, Any]:
        name = module.partition(".")[0]
        if name not in contents:
            raise ImportError(f"{name} is not among what is installed")
        return contents[name]

    return Library(
        load,
        version_of=lambda name: "0" if name in installed else None,
        requirements=tuple,
        has_program=lambda name: name not in KNOWN[gpu.kind] or name in installed,
    )


def _flash_mla(meter: Meter) -> Mapping[str, Any]:
    def decode(q: torch.Tensor, *args: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        meter.launched("flash_mla", 2)
        batch, queries, heads, _ = q.shape
        return q.new_empty(batch, queries, heads, args[3]), q.new_empty(batch, heads, queries)

    return {"get_mla_metadata": lambda *_: (None, None), "flash_mla_with_kvcache": decode}
