"""Maps checkpoint tensors to parameters; checked before weights are read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.safetensors.reader import CheckpointTensor
from atom.model_ops.attention.kv_scale import is_unused_scale, place_kv_scale
from atom.model_ops.weight_mapping import (
    WeightLoading,
    WeightMapping,
    loads_weights,
    names_weights,
)
from atom.model_ops.weights import copy_weight

# Types that need no scale to be interpreted.
_VALUE_TYPES = {"F64", "F32", "F16", "BF16"}
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Target:
    """A parameter, or a buffer that a checkpoint may fill, and its module.

    The tensor itself is not kept: its memory is freed when the module converts it.

    Attributes:
        loader: the module, if it loads tensors itself.
        is_optional: a buffer, which may be absent from the checkpoint.
    """

    module: nn.Module
    parameter_name: str
    dtype: torch.dtype
    loader: WeightLoading | None
    is_optional: bool

    @property
    def parameter(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.module, self.parameter_name)
        return tensor


@dataclass(frozen=True)
class Placement:
    """The destination of a checkpoint tensor; `shard` is its part of a packed parameter."""

    tensor: CheckpointTensor
    target: Target
    shard: str | None

    def copy(self, tensor: torch.Tensor) -> None:
        """Copy the tensor into the model.

        Raises:
            ValueError: when the tensor does not fit.
        """
        if self.target.loader is not None:
            self.target.loader.load_weight(self.target.parameter_name, tensor, self.shard)
        elif self.shard is None:
            copy_weight(self.target.parameter, tensor)
        else:
            raise ValueError(
                f"{type(self.target.module).__name__} cannot take {self.shard} as a part of its "
                f"{self.target.parameter_name}"
            )


def find_targets(model: nn.Module) -> dict[str, Target]:
    """All parameters by full name, and the buffers of `WeightLoading` modules."""
    targets = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        loader = module if loads_weights(module) else None
        for name, parameter in module.named_parameters(recurse=False):
            targets[prefix + name] = Target(module, name, parameter.dtype, loader, False)
        for name, buffer in module.named_buffers(recurse=False):
            if loader is not None:
                targets[prefix + name] = Target(module, name, buffer.dtype, loader, True)
    return targets


def place_tensors(
    tensors: Iterable[CheckpointTensor],
    mapping: WeightMapping,
    targets: dict[str, Target],
    folder: Path,
) -> list[Placement]:
    """Place every tensor that is not ignored, and check that every parameter is filled.

    Tensors that only other ranks load are checked, too, and have no placement.

    Raises:
        WeightError: for tensors that are missing, unexpected, duplicate, or of a dtype that needs a
            scale.
    """
    directory = _Directory(mapping, targets)
    ignored = [re.compile(pattern).fullmatch for pattern in mapping.ignored]
    placements = []
    unexpected = []
    problems = []
    filled: dict[str, set[str | None]] = defaultdict(set)
    for tensor in tensors:
        if any(matches(tensor.name) for matches in ignored):
            continue
        if is_unused_scale(tensor.name):
            continue
        target_name, shard = directory.find(tensor.name)
        target = targets.get(target_name)
        if target is None:
            unexpected.append(tensor.name)
            continue
        shards = directory.covered(target_name, shard)
        if filled[target_name] and (shard is None or filled[target_name] & {*shards, None}):
            problems.append(f"{tensor.name} is given twice")
        filled[target_name] |= shards
        if tensor.dtype not in _VALUE_TYPES and target.dtype in _NUMBERS:
            problems.append(f"{tensor.name} is stored as {tensor.dtype}, which has no plain values")
        if directory.holds(target_name, shard):
            placements.append(Placement(tensor, target, shard))
    if unexpected:
        problems.append(f"unexpected tensors ({len(unexpected)}): {name_some(unexpected)}")
    if missing := _missing(directory, targets, filled):
        problems.append(f"missing tensors ({len(missing)}): {name_some(missing)}")
    raise_if_any(problems, folder)
    return placements


def raise_if_any(problems: list[str], folder: Path) -> None:
    """Raise WeightError with all problems, if there are any."""
    if problems:
        listed = name_some(problems, separator="; ")
        raise WeightError(f"the checkpoint {folder} does not fit the model: {listed}")


class _Directory:
    """Finds the parameter for a checkpoint tensor's name."""

    def __init__(self, mapping: WeightMapping, targets: dict[str, Target]) -> None:
        self._mapping = mapping
        self._targets = targets
        self._naming = {
            full.removesuffix(f".{target.parameter_name}"): target.module
            for full, target in targets.items()
            if names_weights(target.module)
        }

    def find(self, name: str) -> tuple[str, str | None]:
        """Parameter and shard for a checkpoint tensor; an unknown name is returned unchanged."""
        if self._mapping.place is not None:
            return self._mapping.place(name)
        for old, new in self._mapping.renames:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        if modules := self._mapping.modules:
            name = ".".join(filter(None, (modules.get(part, part) for part in name.split("."))))
        if name in self._targets:
            return name, None
        placed = place_kv_scale(name) or self._in_packed(name) or self._by_module(name)
        return placed or (name, None)

    def shards(self, name: str) -> tuple[str, ...]:
        """All shards of a packed parameter."""
        target = self._targets[name]
        if names_weights(target.module):
            return target.module.weight_shards(target.parameter_name)
        module = name.rpartition(".")[0].rpartition(".")[2]
        return self._mapping.packed[module]

    def covered(self, name: str, shard: str | None) -> set[str | None]:
        """The shards that a tensor placed as `shard` fills."""
        module = self._naming.get(name.rpartition(".")[0])
        if module is None or shard is None:
            return {shard}
        return set(module.covers(name.rpartition(".")[2], shard))

    def holds(self, name: str, shard: str | None) -> bool:
        """Whether this rank loads a shard of a parameter."""
        module = self._naming.get(name.rpartition(".")[0])
        return module is None or shard is None or module.holds(shard)

    def _in_packed(self, name: str) -> tuple[str, str | None] | None:
        """In a fused layer, or in a layer within one that has parts in several formats."""
        module, _, parameter = name.rpartition(".")
        parent, dot, part = module.rpartition(".")
        for packed, parts in self._mapping.packed.items():
            fused = f"{parent}{dot}{packed}"
            if part in parts and f"{fused}.{parameter}" in self._targets:
                return f"{fused}.{parameter}", part
            if part in parts and f"{fused}.{part}.{parameter}" in self._targets:
                return f"{fused}.{part}.{parameter}", None
        return None

    def _by_module(self, name: str) -> tuple[str, str | None] | None:
        """Ask the `WeightNaming` modules along the name."""
        for module_name, rest in _cuts(name):
            module = self._naming.get(module_name)
            parent, dot, own = module_name.rpartition(".")
            if module is None and own in self._mapping.adopted:
                module_name = f"{parent}{dot}{self._mapping.adopted[own]}"
                module, rest = self._naming.get(module_name), f"{own}.{rest}"
            placed = module.place_weight(rest) if module is not None else None
            if placed is not None:
                parameter_name, shard = placed
                return f"{module_name}.{parameter_name}", shard
        return None


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """All splits of a dotted name in two, the longest prefix first."""
    end = name.rfind(".")
    while end > 0:
        yield name[:end], name[end + 1 :]
        end = name.rfind(".", 0, end)


def _missing(
    directory: _Directory, targets: dict[str, Target], filled: dict[str, set[str | None]]
) -> list[str]:
    # A parameter shared by two modules may be filled under either name.
    shared = {id(targets[name].parameter) for name in filled}
    missing = []
    for name, target in targets.items():
        found = filled.get(name)
        if target.is_optional:
            continue
        if found is None:
            if id(target.parameter) not in shared:
                missing.append(name)
        elif None not in found:
            lacking = [part for part in directory.shards(name) if part not in found]
            if lacking:
                missing.append(f"{name} (lacks {name_some(lacking)})")
    return missing
