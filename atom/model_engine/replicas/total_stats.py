"""Several engines as one: their limits and their state."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atom.messages import EngineLimits, EngineStats
from atom.stats import total

# What all engines of a server have in common.
_SHARED = ("block_size", "kv_cache_dtype", "expected_acceptance")
_GAUGES = ("num_running", "num_waiting", "num_blocks", "num_used_blocks", "num_lookup_tokens")


def common_limits(limits: Sequence[EngineLimits]) -> EngineLimits:
    """What a request must fit in, whichever of several engines gets it."""
    return msgspec.structs.replace(
        limits[0],
        max_model_len=min(each.max_model_len for each in limits),
        num_blocks=min(each.num_blocks for each in limits),
    )


def total_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """The sum of at least one."""
    known = [msgspec.structs.asdict(part) for part in parts]
    values = {
        name: first if name in _SHARED else sum(fields[name] for fields in known)
        for name, first in known[0].items()
        if name != "spec_decode"
    }
    drafts = [part.spec_decode for part in parts if part.spec_decode is not None]
    return EngineStats(**values, spec_decode=total(drafts) if drafts else None)


def counters_of(stats: EngineStats) -> EngineStats:
    """What an engine that has ended leaves: its totals."""
    return msgspec.structs.replace(stats, **dict.fromkeys(_GAUGES, 0))
