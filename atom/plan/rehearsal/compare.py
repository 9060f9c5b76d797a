"""What the table of ops would lose without a library."""

from __future__ import annotations

from collections.abc import Mapping

from atom.model_ops.op_report import OpLine
from atom.model_ops.registry import OpTable

# By what was asked.
Table = Mapping[str, OpLine]


def table_of(ops: OpTable) -> Table:
    """The choices made so far."""
    return {line.asked: line for line in ops.lines()}


def lost(whole: Table, without: Table) -> list[str]:
    """Ops that another implementation runs in `without`, one phrase each, with the reason."""
    found: dict[str, None] = {}
    for asked, better in whole.items():
        worse = without.get(asked)
        if worse is not None and worse.runs != better.runs:
            op = asked.partition(" ")[0]
            found[f"{op} runs by {worse.runs}, not {better.runs} ({worse.why})"] = None
    return list(found)
