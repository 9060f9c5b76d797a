"""Patterns for the names of modules, from configurations that strangers wrote.

Python's matcher tries every way in which a regular expression may fit: with `(.+)+X` it takes for
ever on the name of a module. Such expressions are refused before they are used.
"""

from __future__ import annotations

import re
import sys
from fnmatch import translate
from importlib import import_module
from typing import Any, NoReturn

from atom.config import ConfigError

_parser: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_MAX_LENGTH = 500
# Characters of a name, and how often one of them, or digits, follow each other.
_NAME_LENGTH = 64
_RUN_LENGTH = 4
# Ways to fit all patterns of a list to a name.
_MAX_WAYS = 1 << 20
_WILDCARD = re.compile(r"[*?]|\[!?\]?[^]]*\]")


class PatternReader:
    """Compiles the patterns of one list.

    Args:
        key: the list's, for errors.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._ways = 0

    def expression(self, text: str, entry: str) -> re.Pattern[str]:
        """Compile a regular expression.

        Args:
            entry: the entry of the list that holds it, for errors.

        Raises:
            ConfigError: when it is none, or could take too long.
        """
        self._check_length(entry)
        try:
            compiled = re.compile(text)
            self._charge(entry, _ways_to_fit(_parser.parse(text)))
        except (re.error, OverflowError, RecursionError, _Endless) as error:
            self._refuse(entry, str(error))
        return compiled

    def glob(self, entry: str, *variants: str) -> Glob:
        """Args:
        variants: globs with the entry's own text of which one has to fit, instead of the entry.
        """
        self._check_length(entry)
        self._charge(entry, 1)
        return Glob(entry, variants or (entry,))

    def _check_length(self, entry: str) -> None:
        if len(entry) > _MAX_LENGTH:
            self._refuse(f"{entry[:_NAME_LENGTH]}...", f"more than {_MAX_LENGTH} characters")

    def _charge(self, entry: str, ways: int) -> None:
        self._ways += max(ways, _NAME_LENGTH)
        if self._ways > _MAX_WAYS:
            self._refuse(entry, "it takes too long to fit it, and those before it, to names")

    def _refuse(self, entry: str, reason: str) -> NoReturn:
        raise ConfigError(f"quantization_config: {self._key} holds {entry!r}: {reason}") from None


class Glob:
    """A glob for whole names; Python's are fast, however many stars they have."""

    def __init__(self, entry: str, variants: tuple[str, ...]) -> None:
        self._longest_piece = max(_WILDCARD.split(entry), key=len)
        self._expression = re.compile("|".join(map(translate, variants)))

    def fits(self, name: str) -> bool:
        # Large mixtures of experts have many names: most are dismissed without the expression.
        return self._longest_piece in name and self._expression.match(name) is not None


class _Endless(Exception):
    pass


def _ways_to_fit(items: Any, is_last: bool = True) -> int:
    """In how many ways a parsed expression may fit a name, at most.

    Args:
        is_last: nothing follows it, so the first way is taken.

    Raises:
        _Endless: for what a name does not bound.
    """
    ways = 1
    for index, (code, value) in enumerate(items):
        ends = is_last and index == len(items) - 1
        match code.name:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT":
                pass
            case "SUBPATTERN":
                ways *= _ways_to_fit(value[-1], ends)
            case "BRANCH":
                ways *= sum(_ways_to_fit(branch, ends) for branch in value[1])
            case "ASSERT" | "ASSERT_NOT":
                ways *= _ways_to_fit(value[1])
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, repeated = value
                ways *= _ways_to_repeat(least, most, repeated, ends)
            case other:
                raise _Endless(f"{other.lower()} is not supported")
    return ways


def _ways_to_repeat(least: int, most: int, items: Any, is_last: bool) -> int:
    inner = _ways_to_fit(items, is_last and most == 1)
    if most == 1:
        return inner + (not least)
    if inner > 1:
        raise _Endless("a repeat of what fits in several ways could take for ever")
    if is_last:
        return 1
    length = _RUN_LENGTH if _is_run(items) else _NAME_LENGTH
    return max(min(most, length) - least + 1, 1)


def _is_run(items: Any) -> bool:
    """Whether a name has but few of them that follow each other: one character, or digits."""
    if len(items) != 1:
        return False
    code, value = items[0]
    digits = (["CATEGORY_DIGIT"], [(ord("0"), ord("9"))])
    if code.name == "IN":
        return [getattr(member, "name", member) for _, member in value] in digits
    return bool(code.name == "LITERAL")
