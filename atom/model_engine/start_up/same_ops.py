"""Refuses ranks that chose different ops, before anything on their devices waits for another.

One rank that lacks a library, or has another build of it, runs another kernel: in a sum over ranks
both then wait for ever, and elsewhere they compute other bits, for which routers choose other
experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup, ParallelGroups, name_ranks
from atom.model_ops.op_table.op_report import OpLine
from atom.model_ops.registry import OpTable

_MOST_DIFFERENCES = 3
_lines: msgspec.json.Decoder[list[OpLine]] = msgspec.json.Decoder(list[OpLine])


def check_same_ops(groups: ParallelGroups, ops: OpTable) -> None:
    """Compare the choices made so far with the other ranks'; all call it at the same point.

    An op that some rank does not have, or has with other sizes, is not compared: the first rank
    alone samples, and not all have as many tokens of the vocabulary, or experts.

    Raises:
        ConfigError: with the op, what it runs on which rank, and why; all ranks of an engine raise
            it, or the first ranks of all engines if engines differ.
    """
    lines = ops.lines()
    # Engines that share experts have ranks of their own behind the first.
    first = groups.ep.rank - groups.tp.rank if groups.is_coupled else 0
    _compare(groups.tp_cpu, lines, first)
    if groups.is_first:
        _compare(groups.dp_cpu, lines, step=groups.tp.size)


def _compare(
    group: ParallelGroup, lines: Sequence[OpLine], first: int = 0, *, step: int = 1
) -> None:
    """Args:
    first: the number of the group's first rank.
    step: how far apart the numbers of its ranks are.
    """
    if group.size == 1:
        return
    every = group.exchange_bytes(msgspec.json.encode(lines))
    tables = {
        first + number * step: {line.asked: line for line in _lines.decode(data)}
        for number, data in enumerate(every)
    }
    if differing := differences(tables):
        more = len(differing) - _MOST_DIFFERENCES
        said = [*differing[:_MOST_DIFFERENCES], *([f"and {more} more differ"] if more > 0 else [])]
        raise ConfigError(
            f"the ranks cannot work together, since they would run different kernels: "
            f"{'; '.join(said)}"
        )


def differences(tables: Mapping[int, Mapping[str, OpLine]]) -> list[str]:
    """What does not run the same on all ranks that have it, one phrase each.

    Args:
        tables: of each rank, by what was asked.
    """
    found = []
    for asked in dict.fromkeys(asked for table in tables.values() for asked in table):
        ranks = defaultdict(list)
        for rank, table in tables.items():
            if asked in table:
                ranks[table[asked].runs].append(rank)
        if len(ranks) > 1:
            runs = (_on_ranks(tables, asked, runs, own) for runs, own in ranks.items())
            found.append(f"{asked} is " + " but ".join(runs))
    return found


def _on_ranks(
    tables: Mapping[int, Mapping[str, OpLine]], asked: str, runs: str, ranks: Sequence[int]
) -> str:
    why = tables[ranks[0]][asked].why
    return f"{runs} on {name_ranks(ranks)}" + (f" ({why})" if why else "")
