"""JSON schemas as grammars whose strings of limited length are quick to follow.

xgrammar counts the characters of such a string as repetitions of a rule, and then tries most of
the vocabulary anew for every token: milliseconds within a string. Said as a chain of rules, each
one character long and ending in the next, the masks are found when the grammar is compiled.
"""

from __future__ import annotations

import re

# Rules of a chain; longer strings stay as they are, since each rule takes time to compile.
MAX_CHAIN = 128

_CHARACTER = r"[^\0-\x1f\"\\\r\n]"
_ONE_CHARACTER = r"(([^\"\\\r\n]))"
_BOUNDED = re.compile(r'^(\w+) ::= \(\("\\"" (\w+)\{(\d+), (\d+)\} "\\""\)\)$', re.MULTILINE)


def chain_bounded_strings(grammar: str) -> str | None:
    """A JSON schema's grammar with its bounded strings as chains; None when it has none.

    Raw control characters, which JSON forbids, are no longer part of such strings.

    Args:
        grammar: as xgrammar prints it.
    """
    longest = -1

    def chain(match: re.Match[str]) -> str:
        nonlocal longest
        name, character, low, high = match[1], match[2], int(match[3]), int(match[4])
        if f"\n{character} ::= {_ONE_CHARACTER}\n" not in grammar or high > MAX_CHAIN:
            return match[0]
        longest = max(longest, high - low)
        start = " ".join(['"\\""', *[_CHARACTER] * low, _rest(high - low)])
        return f"{name} ::= (({start}))"

    chained = _BOUNDED.sub(chain, grammar)
    if longest < 0:
        return None
    rules = [f'{_rest(0)} ::= (("\\""))']
    for count in range(1, longest + 1):
        rules.append(f'{_rest(count)} ::= (("\\"") | ({_CHARACTER} {_rest(count - 1)}))')
    return "\n".join([chained.rstrip("\n"), *rules, ""])


def _rest(count: int) -> str:
    """The rule of at most `count` characters and the closing quote."""
    return f"bounded_string_rest_{count}"
