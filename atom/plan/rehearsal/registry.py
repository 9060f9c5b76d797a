"""The op table of a rehearsal: the same choices, with weights that are converted once a kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from atom.model_ops.registry import Implementation

Registry = Mapping[str, tuple[Implementation, ...]]


def converting_once(registry: Registry) -> Registry:
    """Layers of the same sizes share what their weights are converted to, which holds no data:
    hundreds of experts are converted one by one.
    """
    return {
        op: tuple(
            dataclasses.replace(each, load_prepare=_once(each.load_prepare)) for each in listed
        )
        for op, listed in registry.items()
    }


def _once(load: Callable[[], Any] | None) -> Callable[[], Any] | None:
    if load is None:
        return None
    known: dict[object, Any] = {}

    def loaded() -> Callable[..., Any]:
        prepare = load()

        def convert(*weights: Any) -> Any:
            key = tuple(kind_of(each) for each in weights)
            if key not in known:
                known[key] = prepare(*weights)
            return known[key]

        return convert

    return loaded


def kind_of(value: Any) -> object:
    """What a conversion depends on: shapes, dtypes and formats."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return tuple((each.name, kind_of(getattr(value, each.name))) for each in fields)
    return repr(value)
