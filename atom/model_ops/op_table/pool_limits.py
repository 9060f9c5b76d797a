"""Which implementations of ops a KV cache is too large for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atom.model_ops.registry import Implementation, OpChoice, OpQuery


@dataclass(frozen=True)
class PoolLimit:
    """An implementation that was passed over, and would not be with fewer blocks in the KV cache.

    Attributes:
        name: of the implementation.
        ops: that it would run.
        reason: why it was passed over.
        most_blocks: with which it would not be, spare ones included.
    """

    name: str
    ops: tuple[str, ...]
    reason: str
    most_blocks: int


def find_limits(
    choices: Iterable[OpChoice], candidates: Callable[[str], Iterable[Implementation]]
) -> list[PoolLimit]:
    """The limits behind these choices; one for all ops with the same implementation and reason.

    Args:
        candidates: all implementations of an op.
    """
    found: dict[tuple[str, str], PoolLimit] = {}
    for choice in choices:
        if "num_blocks" not in choice.query.shape:
            continue
        # To ask others would import what no op needs.
        names = dict(choice.passed_over)
        for candidate in (c for c in candidates(choice.op) if c.name in names):
            why = candidate.name, candidate.refuses(choice.query) or ""
            if why not in choice.passed_over or not (most := _most(candidate, choice.query)):
                continue
            known = found.get(why, PoolLimit(why[0], (), why[1], most))
            ops = tuple(dict.fromkeys((*known.ops, choice.op)))
            found[why] = replace(known, ops=ops, most_blocks=min(known.most_blocks, most))
    return list(found.values())


def _most(candidate: Implementation, query: OpQuery) -> int:
    """The most blocks with which it is not refused; 0 if it always is."""

    def is_refused(num_blocks: int) -> bool:
        shape = {**query.shape, "num_blocks": num_blocks}
        return candidate.refuses(replace(query, shape=shape)) is not None

    return bisect_left(range(1, query.shape["num_blocks"] + 1), True, key=is_refused)
