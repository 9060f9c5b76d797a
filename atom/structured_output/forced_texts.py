"""How long the texts of a grammar are: the shortest, and one that must follow as the only one.

A forced text begins every text that may follow, so it is no longer than the shortest of them. Where
a rule has no finite text, or only huge ones, it may have no end, and xgrammar would look for it.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

_RULE = re.compile(r"^([\w.-]+) ::= ", re.MULTILINE)
_SYMBOL = re.compile(
    r"""
    (?P<text>"(?:\\.|[^"\\])*")
    | (?P<characters>\[(?:\\.|[^\]\\])*\])(?P<star>\*?)
    | \{(?P<low>\d+)[^}]*\}
    | (?P<function>[\w.-]+\()
    | (?P<name>[\w.-]+)
    | (?P<ahead>\(=)
    | (?P<mark>[()|])
    """,
    re.VERBOSE,
)
_FUNCTION = re.compile(r"[\w.-]+\(")
_CHARACTER_BYTES = 4
_ROOT = "root"


@dataclass
class _Choice:
    """One alternative of a rule: bytes of its own, and rules with how often they stand in it."""

    rule: str
    length: float = 0.0
    parts: dict[str, int] = field(default_factory=dict)

    def add(self, part: str | int, times: int) -> None:
        """Add a rule, or so many bytes, several times or, below 0, take it out again."""
        if isinstance(part, int):
            self.length += part * times
            return
        count = self.parts.pop(part, 0) + times
        if count:
            self.parts[part] = count

    def total(self, shortest: dict[str, float]) -> float:
        """Infinite where a part has no finite text, or one too long for a float."""
        parts = (shortest.get(name, math.inf) * times for name, times in self.parts.items())
        return self.length + sum(parts)


@dataclass(frozen=True)
class TextLengths:
    """Upper bounds in bytes: a character of a set counts 4, an escape as it is written.

    Attributes:
        forced: of what the begun text of one rule lets follow as the only way to its end. Infinite
            if a rule has an alternative without any finite text.
        shortest: of the shortest text of the whole, and of each part that a tag begins. Infinite if
            one has no finite text.
    """

    forced: float
    shortest: float


def text_lengths(grammar: str) -> TextLengths:
    """Args:
    grammar: as printed by xgrammar.
    """
    found = list(_RULE.finditer(grammar))
    ends = [match.start() for match in found[1:]] + [len(grammar)]
    bodies = {m[1]: grammar[m.end() : end] for m, end in zip(found, ends, strict=True)}
    choices = [choice for rule, body in bodies.items() for choice in _choices(rule, body)]
    shortest = _solve(choices)
    whole = [name for body in bodies.values() for name in _begun_by_tags(body)]
    return TextLengths(
        forced=max((choice.total(shortest) for choice in choices), default=math.inf),
        shortest=max(
            shortest.get(name, math.inf) for name in [_ROOT, *whole] if name in (*bodies, _ROOT)
        ),
    )


def _begun_by_tags(body: str) -> Iterator[str]:
    """The rules that a function's tags begin: each is a text of its own within free text."""
    if _FUNCTION.match(body):
        yield from (symbol["name"] for symbol in _SYMBOL.finditer(body) if symbol["name"])


def _choices(rule: str, body: str) -> Iterator[_Choice]:
    """The alternatives of a rule; those of a group within become rules of their own."""
    groups = [_Choice(rule)]
    num_groups = 0
    last: str | int = 0
    for symbol in _symbols(body):
        given = symbol[0]
        if given == "(":
            num_groups += 1
            groups.append(_Choice(f"{rule}({num_groups}"))
        elif given in ("|", ")"):
            ended = groups.pop()
            yield ended
            if given == "|":
                groups.append(_Choice(ended.rule))
            else:
                last = ended.rule
                groups[-1].add(last, 1)
        elif symbol["low"] is not None:
            groups[-1].add(last, int(symbol["low"]) - 1)
        else:
            last = _part(symbol)
            groups[-1].add(last, 1)
    yield groups[0]


def _symbols(body: str) -> Iterator[re.Match[str]]:
    """All but free text, which may be empty, and what is only looked at."""
    depth = 0
    for symbol in _SYMBOL.finditer(body):
        is_skipped = symbol.lastgroup in ("function", "ahead")
        if depth or is_skipped:
            depth += (is_skipped or symbol[0] == "(") - (symbol[0] == ")")
        else:
            yield symbol


def _part(symbol: re.Match[str]) -> str | int:
    """A rule's name, or how many bytes stand here; escapes only lengthen a text."""
    if symbol["name"] is not None:
        return symbol["name"]
    if symbol["text"] is not None:
        return len(symbol["text"]) - 2
    return 0 if symbol["star"] else _CHARACTER_BYTES


def _solve(choices: list[_Choice]) -> dict[str, float]:
    """The shortest length of each rule that has one, found in the order of their lengths."""
    users: defaultdict[str, list[int]] = defaultdict(list)
    missing = [len(choice.parts) for choice in choices]
    shortest: dict[str, float] = {}
    ready: list[tuple[float, str]] = [
        (choice.length, choice.rule) for choice in choices if not choice.parts
    ]
    for index, choice in enumerate(choices):
        for name in choice.parts:
            users[name].append(index)
    # Names that are no rules stand for nothing that is known to be long.
    ready += [(0, name) for name in users.keys() - {choice.rule for choice in choices}]
    heapq.heapify(ready)
    while ready:
        length, rule = heapq.heappop(ready)
        if rule in shortest:
            continue
        shortest[rule] = length
        for index in users[rule]:
            missing[index] -= 1
            if not missing[index]:
                choice = choices[index]
                heapq.heappush(ready, (choice.total(shortest), choice.rule))
    return shortest
