"""Where the tensors of a checkpoint go in a model of transformers' classes.

Source: transformers' own table of conversions, applied to names here, and to values where experts
that the checkpoint has one by one are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    rename_source_key,
)

from atom.config import ConfigError
from atom.model_ops.weight_mapping import WeightMapping
from atom.model_ops.weights import copy_weight
from atom.models.transformers.probe import is_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The base without its text network, in the model of ours.
_TOWER = "vision.inner"
# Layers of ours, and those of a checkpoint that they stack.
_FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
}
_FUSED_OF = {part: fused for fused, parts in _FUSED.items() for part in parts}
_NUMBER = re.compile(r"\.(\d+)\.")


class ExpertLoading(nn.Module):
    """Loads experts that a checkpoint has one by one into stacked parameters.

    Mixed into the class of a module of transformers.

    Attributes:
        stacked: parameter -> the axis of an expert along which its matrices lie, and how many.
    """

    stacked: Mapping[str, tuple[int, int]]

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Copy all experts, or the matrix `expert.number`.

        Raises:
            ValueError: with both shapes, when they do not match.
        """
        parameter = self.get_parameter(name)
        if shard is None:
            copy_weight(parameter, tensor)
            return
        expert, number = map(int, shard.split("."))
        axis, count = self.stacked[name]
        copy_weight(parameter[expert].chunk(count, axis)[number], tensor)

    def place_weight(self, name: str) -> None:
        """The names are known before."""

    def weight_shards(self, name: str) -> tuple[str, ...]:
        count = self.stacked[name][1]
        experts = range(len(self.get_parameter(name)))
        return tuple(f"{expert}.{number}" for expert in experts for number in range(count))

    def covers(self, name: str, shard: str) -> tuple[str, ...]:
        return (shard,)

    def holds(self, shard: str) -> bool:
        return True


class Names:
    """The names of a model with its head, before anything in it is replaced.

    Args:
        inner: where the text network is in its base; "" if that is all of it.
    """

    def __init__(self, model: PreTrainedModel, inner: str = "") -> None:
        self._outer, self._class = model.base_model_prefix, type(model).__name__
        self._prefix = f"{self._outer}.{inner}" if inner else self._outer
        # What else is in the base.
        parts = model.get_submodule(self._outer) if inner else model
        named = [*dict(parts.named_children()), *dict(parts.named_parameters(recurse=False))]
        self._tower = tuple(name for name in named if name != inner) if inner else ()
        self._known = dict.fromkeys(model.state_dict(), True)
        mapping = get_model_conversion_mapping(model)
        self._renamings = [m for m in mapping if not isinstance(m, WeightConverter)]
        self._converters = [m for m in mapping if isinstance(m, WeightConverter)]
        self._ignored = tuple(model._keys_to_ignore_on_load_unexpected or ())
        self._float32 = tuple(model._keep_in_fp32_modules_strict or ())
        self._float32_for_float16 = tuple(model._keep_in_fp32_modules or ())

    def of_base(self, name: str) -> str:
        """The checkpoint's name of a module of the base."""
        return f"{self._prefix}.{name}"

    def stays_float32(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a module or parameter is kept in float32 in models of `dtype`."""
        patterns = self._float32
        if dtype == torch.float16:
            patterns += self._float32_for_float16
        return dtype != torch.float32 and any(
            re.search(rf"(^|\.){pattern}($|\.)", name) for pattern in patterns
        )

    def mapping(self, model: nn.Module, tied_head: str | None) -> WeightMapping:
        """For `model`, whose `base` and `hf` are the parts of transformers' model.

        Args:
            tied_head: the head that is the embedding, in `hf`.
        """
        ignored = [self._unless_known(pattern) for pattern in self._ignored]
        ignored.append(r".*rotary_emb\.inv_freq")
        if self._tower and not any(name.startswith(_TOWER) for name, _ in model.named_parameters()):
            ignored.append(rf"(.*\.)?({'|'.join(self._tower)})(\..*)?")
        if tied_head is not None:
            ignored.append(rf"{re.escape(tied_head)}\.weight")
        known = set(dict(model.named_parameters())) | set(dict(model.named_buffers()))

        def place(name: str) -> tuple[str, str | None]:
            found, shard = self._place(name)
            module, _, parameter = found.rpartition(".")
            parent, _, part = module.rpartition(".")
            inner, fused = f"{module}.inner.{parameter}", f"{parent}.{_FUSED_OF.get(part)}"
            if found not in known and inner in known:
                return inner, shard
            if f"{fused}.{parameter}" in known:
                return f"{fused}.{parameter}", part
            if f"{fused}.{part}.{parameter}" in known:
                return f"{fused}.{part}.{parameter}", None
            return found, shard

        return WeightMapping(ignored=tuple(ignored), packed=_FUSED, place=place)

    def _unless_known(self, pattern: str) -> str:
        """A pattern of whole names that the model does not have."""
        clashing = [re.escape(name) for name in self._known if re.search(pattern, name)]
        unless = f"(?!(?:{'|'.join(clashing)})$)" if clashing else ""
        return f"{unless}.*(?:{pattern}).*"

    def _place(self, name: str) -> tuple[str, str | None]:
        renamed, pattern = rename_source_key(
            name, self._renamings, self._converters, self._outer, self._known
        )
        shard = None
        if pattern is not None:
            converter = next(c for c in self._converters if pattern in c.source_patterns)
            try:
                _axis(converter)
            except ConfigError as error:
                raise ConfigError(f"{self._class} of transformers: {error}") from None
            number = _NUMBER.findall(name)[-1]
            shard = f"{number}.{converter.source_patterns.index(pattern)}"
        side, rest = "hf", renamed
        if renamed.startswith(f"{self._prefix}."):
            side, rest = "base", renamed.removeprefix(f"{self._prefix}.")
        elif self._tower and renamed.startswith(f"{self._outer}."):
            side, rest = _TOWER, renamed.removeprefix(f"{self._outer}.")
        return f"{side}.{rest}", shard

    def stack_experts(self, model: nn.Module) -> None:
        """Let modules load what the converters stack."""
        for converter in self._converters:
            for target in converter.target_patterns:
                for name, module in list(model.named_modules()):
                    for parameter, _ in list(module.named_parameters(recurse=False)):
                        full = f"{name}.{parameter}"
                        if is_experts(module) and full.endswith(target.lstrip("^").rstrip("$")):
                            _stack(module, parameter, converter)


def _stack(module: nn.Module, parameter: str, converter: WeightConverter) -> None:
    if not isinstance(module, ExpertLoading):
        members: dict[str, Any] = {"stacked": {}}
        module.__class__ = type(type(module).__name__, (ExpertLoading, type(module)), members)
    assert isinstance(module, ExpertLoading)
    matrices = _axis(converter), len(converter.source_patterns)
    module.stacked = {**module.stacked, parameter: matrices}


def _axis(converter: WeightConverter) -> int:
    """The axis of an expert along which its matrices lie.

    Raises:
        ConfigError: for a conversion that does not stack experts.
    """
    operations: list[Any] = list(converter.operations)
    if operations and isinstance(operations[0], MergeModulelist):
        if len(operations) == 1:
            return 0
        if len(operations) == 2 and isinstance(operations[1], Concatenate):
            return int(operations[1].dim) - 1
    named = ", ".join(type(operation).__name__ for operation in operations)
    raise ConfigError(
        f"transformers converts {', '.join(converter.source_patterns)} by {named}, which is not "
        f"supported"
    )
