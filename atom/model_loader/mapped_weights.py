"""Parameters that are mapped from a file instead of copied.

Their pages are those of the page cache: a start reads nothing that is there already, and processes
with the same model share it. Writes would change a copy of the page. Only for files that nobody
changes, such as those that GGUF files were converted to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from atom.model_loader.placement import Placement
from atom.model_loader.safetensors.reader import CheckpointTensor, WeightFile
from atom.model_ops.moe import FusedMoE
from atom.model_ops.stacked import StackedMatrix

# Lines of the processors' caches: vectors that cross them take longer.
_ALIGNMENT = 64


def map_parameters(file: WeightFile, placements: Sequence[Placement]) -> set[str]:
    """Map the parameters whose bytes lie in the file as they are -> names of their tensors.

    Args:
        placements: of all tensors of this file. Those of a parameter that other files hold a part
            of are never all of its bytes.
    """
    of_parameters: dict[tuple[int, str], list[Placement]] = defaultdict(list)
    for placement in placements:
        target = placement.target
        of_parameters[id(target.module), target.parameter_name].append(placement)
    mapped: set[str] = set()
    for group in of_parameters.values():
        parameter = group[0].target.parameter
        parts = _in_order(group)
        if parts is not None and _are_bytes_of(parameter, parts):
            first = parts[0].tensor
            whole = replace(first, shape=tuple(parameter.shape), num_bytes=parameter.nbytes)
            parameter.data = file.map([whole])[0]
            mapped |= {part.tensor.name for part in parts}
    return mapped


def _in_order(placements: Sequence[Placement]) -> list[Placement] | None:
    """By place in the parameter; None where it is not the tensors' values as they are."""
    target = placements[0].target
    if target.loader is None:
        return list(placements) if [p.shard for p in placements] == [None] else None
    if not isinstance(target.loader, (StackedMatrix, FusedMoE)):
        return None
    shards = target.loader.stored_in(target.parameter_name)
    by_shard = {placement.shard: placement for placement in placements}
    if set(by_shard) != set(shards) or len(placements) != len(shards):
        return None
    return [by_shard[shard] for shard in shards]


def _are_bytes_of(parameter: torch.Tensor, parts: Sequence[Placement]) -> bool:
    tensors = [part.tensor for part in parts]
    return (
        parameter.device.type == "cpu"
        and tensors[0].offset % _ALIGNMENT == 0
        and all(tensor.torch_dtype is parameter.dtype for tensor in tensors)
        and all(tensor.shape and _fits(parameter, tensor) for tensor in tensors)
        and sum(tensor.num_bytes for tensor in tensors) == parameter.nbytes
        and all(a.offset + a.num_bytes == b.offset for a, b in pairwise(tensors))
    )


def _fits(parameter: torch.Tensor, tensor: CheckpointTensor) -> bool:
    """Whether rows of the tensor are those of the parameter, which may have experts in front."""
    return tuple(parameter.shape)[parameter.dim() - len(tensor.shape) + 1 :] == tensor.shape[1:]
