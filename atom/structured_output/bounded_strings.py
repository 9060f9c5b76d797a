"""Rewrites bounded strings in JSON schema grammars so that masks are fast to compute.

xgrammar compiles a string with maxLength as a counted repetition, and then checks most of the
vocabulary again at every token, which takes milliseconds. As a chain of rules, one per character,
the masks are computed when the grammar is compiled.
"""

from __future__ import annotations

import re

# Maximum rules of a chain; longer strings are left unchanged, since each rule takes time to
# compile.
MAX_CHAIN = 128

_CHARACTER = r"[^\0-\x1f\"\\\r\n]"
_ONE_CHARACTER = r"(([^\"\\\r\n]))"
_BOUNDED = re.compile(r'^(\w+) ::= \(\("\\"" (\w+)\{(\d+), (\d+)\} "\\""\)\)$', re.MULTILINE)


def chain_bounded_strings(grammar: str) -> str | None:
    """Rewrite the bounded strings of a JSON schema's grammar; None if there are none.

    The rewritten strings no longer allow raw control characters, which JSON forbids.

    Args:
        grammar: as printed by xgrammar.
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
    """The rule for at most `count` more characters and the closing quote."""
    return f"bounded_string_rest_{count}"
