"""The op table as text: what runs, and why better implementations do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atom.model_ops.registry import OpChoice, OpQuery

_HEADER = ("op", "runs", "where", "its cost, and better ones passed over")
# Up to this many sizes are listed; more are only counted.
_MOST_VALUES = 4

_Reasons = tuple[tuple[str, str], ...]
_Decision = tuple[str, _Reasons, str]


def format_choices(choices: Iterable[OpChoice]) -> str:
    """One row per distinct decision.

    If an op has several, the column `where` distinguishes them by dtypes and sizes. What a choice
    costs has a line, and so has each better implementation with its reason.
    """
    decisions: dict[str, dict[_Decision, list[OpQuery]]] = {}
    for choice in choices:
        of_op = decisions.setdefault(choice.op, {})
        decision = choice.name, choice.passed_over, choice.note
        of_op.setdefault(decision, []).append(choice.query)
    lines: list[Sequence[str]] = [_HEADER]
    for op, of_op in decisions.items():
        apart = _telling_apart(list(of_op.values()))
        for (name, passed_over, note), queries in of_op.items():
            reasons = [note] if note else []
            reasons += [f"not {better}: {' '.join(why.split())}" for better, why in passed_over]
            lines.append((op, name, _where(queries, apart), *(reasons[:1] or [""])))
            lines += [("", "", "", reason) for reason in reasons[1:]]
    columns = list(zip(*lines, strict=True))[:-1]
    widths = [max(map(len, column)) if any(column[1:]) else 0 for column in columns]
    return "\n".join(_join(line, widths) for line in lines)


@dataclass(frozen=True)
class OpLine:
    """One choice in words.

    Attributes:
        asked: the op with the dtypes and sizes it was chosen for.
        runs: the implementation, and the KV cache layout of one that wants its own.
        why: of each better implementation, why it does not run; "" where there is none.
    """

    asked: str
    runs: str
    why: str


def list_choices(choices: Iterable[OpChoice]) -> list[OpLine]:
    """One line for each op with dtypes and sizes.

    An op that was chosen twice, for caches whose other ops differ, has both choices in its line.
    """
    lines: dict[str, OpLine] = {}
    for choice in choices:
        asked = f"{choice.op} ({', '.join(_asked(choice.query))})"
        runs = choice.name if choice.layout == "plain" else f"{choice.name} ({choice.layout})"
        why = "; ".join(f"not {name}: {' '.join(why.split())}" for name, why in choice.passed_over)
        if (other := lines.get(asked)) is not None and other.runs != runs:
            runs, why = f"{other.runs} and {runs}", "; ".join(filter(None, (other.why, why)))
        lines[asked] = OpLine(asked, runs, why)
    return list(lines.values())


def _asked(query: OpQuery) -> list[str]:
    said = [f"dtype={_short(query.dtype)}"]
    if query.storage is not None:
        said.append(f"cache={_short(query.storage)}")
    if query.weights is not None:
        said.append(f"weights=[{query.weights}]")
    if query.down_weights is not None:
        said.append(f"down=[{query.down_weights}]")
    return said + [f"{name}={value}" for name, value in query.shape.items()]


def _join(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [f"{cell:<{width}}" for cell, width in zip(line, widths, strict=False) if width]
    return "  ".join([*cells, line[-1]]).rstrip()


def _telling_apart(groups: Sequence[Sequence[OpQuery]]) -> list[str]:
    """Names of the properties that differ between decisions."""
    if len(groups) == 1:
        return []
    values = [_values(group) for group in groups]
    return [name for name in values[0] if any(v.get(name) != values[0][name] for v in values)]


def _where(queries: Sequence[OpQuery], names: Iterable[str]) -> str:
    values = _values(queries)
    return " ".join(f"{name}={_listed(list(values.get(name, ())))}" for name in names)


def _values(queries: Sequence[OpQuery]) -> Mapping[str, Mapping[str, None]]:
    """Each property's distinct values, in order."""
    values: dict[str, dict[str, None]] = {}
    for query in queries:
        properties = {
            "dtype": _short(query.dtype),
            "cache": _short(query.storage),
            "weights": f"[{query.weights}]",
            "down": f"[{query.down_weights}]",
            **query.shape,
        }
        for name, value in properties.items():
            values.setdefault(name, {})[str(value)] = None
    return values


def _listed(values: Sequence[str]) -> str:
    if len(values) <= _MOST_VALUES:
        return ",".join(values)
    return ",".join(values[:_MOST_VALUES]) + f",... ({len(values)})"


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
