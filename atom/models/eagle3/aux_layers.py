"""The layer id conventions of published Eagle3 drafts."""

from __future__ import annotations

import enum
from collections.abc import Sequence


class AuxConvention(str, enum.Enum):
    """What a layer id names.

    BOUNDARY: id i is the hidden state that enters decoder layer i.
    OUTPUT: id i is the output of layer i, which enters layer i + 1.
    """

    BOUNDARY = "boundary"
    OUTPUT = "output"


def resolve_aux_layer_ids(
    layer_ids: Sequence[int], num_layers: int
) -> tuple[tuple[int, ...], AuxConvention]:
    """Convert a draft's layer ids to boundary ids of a target with `num_layers` layers.

    Both conventions are in use and checkpoints do not state theirs, but all published drafts whose
    first id is 1 use output ids, and no others do.

    Raises:
        ValueError: when there are no ids, or one is duplicate or out of range.
    """
    first = next(iter(layer_ids), None)
    convention = AuxConvention.OUTPUT if first == 1 else AuxConvention.BOUNDARY
    shift = 1 if convention is AuxConvention.OUTPUT else 0
    resolved = tuple(i + shift for i in layer_ids)
    if not resolved or len(set(resolved)) != len(resolved):
        raise ValueError(f"aux layer ids must be distinct and at least one; got {list(layer_ids)}")
    if any(not 0 <= i <= num_layers for i in resolved):
        raise ValueError(
            f"aux layer ids {list(layer_ids)} ({convention.value} ids) must lie in "
            f"0..{num_layers - shift} for a target of {num_layers} layers"
        )
    return resolved, convention
