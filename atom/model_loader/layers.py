"""Checks and converts each layer as soon as its last tensor was loaded."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import torch
from torch import nn

from atom.model_loader.placement import Placement
from atom.model_loader.safetensors.reader import map_tensor
from atom.model_ops.finite import check_finite, may_be_infinite
from atom.model_ops.weight_mapping import converts_weights

# Bytes of a layer that all threads convert. Smaller ones on a CPU are converted by the threads that
# loaded them, each by itself; on a device one thread does it, which has chosen that device.
_WORTH_THREADS = 64 << 20


class LayerQueue:
    """The modules of a model that wait for their tensors.

    Threads load, check and convert them; one thread converts the large ones, so that no two of
    these have both forms of their weights in memory.
    """

    def __init__(self, model: nn.Module, placements: Sequence[Placement]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._small = {id(module) for module in model.modules() if _is_small(module)}
        self._modules = {
            id(module): module for module in model.modules() if converts_weights(module)
        }
        self._placements: dict[int, list[Placement]] = defaultdict(list)
        for placement in placements:
            self._placements[id(placement.target.module)].append(placement)
        self._missing = Counter({key: len(of) for key, of in self._placements.items()})
        self._counting = threading.Lock()
        self._loaded: deque[int] = deque()

    def loaded(self, placement: Placement) -> list[str]:
        """Count one tensor as loaded -> what is wrong with its module's values, after the last.

        A small module is then converted, by this thread alone.
        """
        key = id(placement.target.module)
        with self._counting:
            self._missing[key] -= 1
            is_last = self._missing[key] == 0
        if not is_last:
            return []
        errors = self._check(self._placements.pop(key))
        if errors:
            return errors
        if key in self._small:
            return self._convert(key)
        self._loaded.append(key)
        return []

    def convert_loaded(self) -> list[str]:
        """Convert the large modules that have all of their tensors -> what is wrong with them."""
        errors = []
        while self._loaded:
            errors += self._convert(self._loaded.popleft())
        return errors

    def convert_rest(self) -> list[str]:
        """Convert the modules that no tensor was loaded into, such as those with dummy weights."""
        return [error for key in list(self._modules) for error in self._convert(key)]

    def _check(self, placements: Sequence[Placement]) -> list[str]:
        """Find NaN and infinity; the files are read again only if a sum is not finite."""
        targets = {p.target.parameter_name: p.target.parameter for p in placements}
        suspects = {name for name, values in targets.items() if may_be_infinite(values)}
        errors = []
        for placement in placements:
            if placement.target.parameter_name not in suspects:
                continue
            tensor = placement.tensor
            values = map_tensor(tensor)
            try:
                check_finite(values)
            except ValueError as error:
                errors.append(f"{tensor.name}: {error}")
        return errors

    @torch.no_grad()
    def _convert(self, key: int) -> list[str]:
        module = self._modules.pop(key, None)
        if module is None:
            return []
        try:
            module.process_after_loading()
        except ValueError as error:
            return [f"{self._names[key]}: {error}"]
        return []


def _is_small(module: nn.Module) -> bool:
    parameters = list(module.parameters(recurse=False))
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    return num_bytes < _WORTH_THREADS and all(p.device.type == "cpu" for p in parameters)
