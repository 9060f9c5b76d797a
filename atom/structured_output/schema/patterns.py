"""Regular expressions as EBNF rules, for plain texts and for the strings of JSON documents.

The syntax is that of ECMA-262, which JSON schema asks for, with `\\A` and `\\Z` for those who write
Python's. What has another meaning in one of the two, or cannot be a grammar, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

# Code points, both ends included.
Range = tuple[int, int]

_LAST = 0x10FFFF
# What a JSON string may hold as it is: no quote, backslash, control character or surrogate.
_RAW: tuple[Range, ...] = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))
_TEXT: tuple[Range, ...] = ((0, 0xD7FF), (0xE000, _LAST))
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}

_DIGITS: tuple[Range, ...] = ((0x30, 0x39),)
_WORD: tuple[Range, ...] = (*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
# White space of ECMA-262 and of Python at once, and of either.
_SPACE: tuple[Range, ...] = (
    *((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_ANY_SPACE = (*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))
_LINE_ENDS: tuple[Range, ...] = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_MAX_DEPTH = 100


class PatternError(ValueError):
    """The pattern is malformed or cannot be a grammar; the message says why."""


@dataclass(frozen=True)
class _Chars:
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class _Anchor:
    at_start: bool


@dataclass(frozen=True)
class _Repeat:
    item: _Node
    low: int
    high: int | None


@dataclass(frozen=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True)
class _Choice:
    branches: tuple[_Node, ...]


_Node = _Chars | _Anchor | _Repeat | _Sequence | _Choice
Unit = Callable[[tuple[Range, ...]], str]


def text_rule(pattern: str) -> str:
    """The right side of an EBNF rule for the texts that the pattern matches as a whole.

    Raises:
        PatternError: when the pattern is malformed or cannot be a grammar.
    """
    return _Writer(_text_unit, "").write(_Parser(pattern).parse(), True, True)


@lru_cache(maxsize=1024)
def json_rule(
    pattern: str, shortest: int = 0, longest: int | None = None, *, is_raw: bool = False
) -> str:
    """As `text_rule`, for what stands between the quotes of a JSON string in whose value the
    pattern is found.

    Args:
        shortest, longest: bounds of the value in characters.
        is_raw: the string may stand without quotes and escapes too: what needs them is left out.

    Raises:
        PatternError: also for bounds of the length beside a pattern that is more than one repeated
            class of characters between anchors.
    """
    node = _Parser(pattern).parse()
    if shortest > 0 or longest is not None:
        node = _bounded(node, shortest, longest)
    unit = _raw_unit if is_raw else _json_unit
    return _Writer(unit, f"{unit(_TEXT)}*").write(node, True, True)


def _bounded(node: _Node, shortest: int, longest: int | None) -> _Node:
    match node:
        case _Sequence((_Anchor(True), _Repeat(_Chars() as item, low, high), _Anchor(False))):
            tops = [top for top in (high, longest) if top is not None]
            low, top = max(low, shortest), min(tops, default=None)
            if top is not None and top < low:
                raise PatternError("no text of the given length matches the pattern")
            return _Sequence((_Anchor(True), _Repeat(item, low, top), _Anchor(False)))
    raise PatternError("the length is only counted in patterns such as '^[a-z]+$'")


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        node = self._choice()
        if self._at < len(self._pattern):
            raise PatternError("a parenthesis is closed that was not opened")
        return node

    def _peek(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        found = self._peek(text)
        self._at += len(text) * found
        return found

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise PatternError("the pattern ends within an escape or a class")
        self._at += 1
        return self._pattern[self._at - 1]

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"groups are nested deeper than {_MAX_DEPTH} levels")
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        self._depth -= 1
        return branches[0] if len(branches) == 1 else _Choice(tuple(branches))

    def _sequence(self) -> _Node:
        items: list[_Node] = []
        while self._at < len(self._pattern) and not self._peek("|") and not self._peek(")"):
            items.append(self._repeated(self._item()))
        return _Sequence(tuple(items))

    def _repeated(self, item: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return item
        if isinstance(item, _Anchor):
            raise PatternError("an anchor is repeated")
        self._take("?")  # lazy: the same texts
        if self._peek("+") or self._peek("*") or self._bounds() is not None:
            raise PatternError("a repetition is repeated, or possessive")
        return _Repeat(item, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        if not self._peek("{"):
            return None
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : max(end, self._at)].partition(",")
        if not (low.isascii() and low.isdigit() and (not high or high.isdigit())):
            raise PatternError("'{' stands where it begins no repetition such as {2,5}; escape it")
        self._at = end + 1
        most = (int(high) if high else None) if comma else int(low)
        if most is not None and most < int(low):
            raise PatternError("the bounds of a repetition are in the wrong order")
        return int(low), most

    def _item(self) -> _Node:
        character = self._next()
        match character:
            case "^":
                return _Anchor(True)
            case "$":
                return _Anchor(False)
            case ".":
                return _Chars(_complement(_LINE_ENDS))
            case "[":
                return _Chars(self._class())
            case "(":
                return self._group()
            case "\\":
                return self._escape()
            case "*" | "+" | "?" | "{":
                raise PatternError(f"{character!r} has nothing to repeat")
        return _single(ord(character))

    def _group(self) -> _Node:
        if self._take("?"):
            if self._peek("=") or self._peek("!"):
                raise PatternError("lookahead is not supported")
            if self._peek("<=") or self._peek("<!"):
                raise PatternError("lookbehind is not supported")
            if self._take("P<") or self._take("<"):
                while self._next() != ">":
                    pass
            elif not self._take(":"):
                raise PatternError("flags, conditions and atomic groups are not supported")
        node = self._choice()
        if not self._take(")"):
            raise PatternError("a parenthesis is not closed")
        return _Choice((node,))

    def _escape(self) -> _Node:
        escaped = self._next()
        match escaped:
            case "A":
                return _Anchor(True)
            case "Z" | "z":
                return _Anchor(False)
            case "b" | "B":
                raise PatternError(f"the word boundary '\\{escaped}' is not supported")
            case "k":
                raise PatternError("back references are not supported")
        if escaped in "123456789":
            raise PatternError("back references are not supported")
        return _Chars(self._escaped(escaped))

    def _escaped(self, escaped: str, is_negated: bool = False) -> tuple[Range, ...]:
        """What an escape means in and outside of classes."""
        # Of white space, what is such for both; in a negated class, for either.
        sets = {"d": _DIGITS, "w": _WORD, "s": _ANY_SPACE if is_negated else _SPACE}
        if escaped in sets:
            return sets[escaped]
        outside = {"D": _DIGITS, "W": _WORD, "S": _SPACE if is_negated else _ANY_SPACE}
        if escaped in outside:
            return _complement(outside[escaped])
        if escaped in _CONTROLS:
            if escaped == "0" and self._pattern[self._at : self._at + 1].isdigit():
                raise PatternError("octal escapes are not supported")
            return ((_CONTROLS[escaped], _CONTROLS[escaped]),)
        if escaped in "xu":
            point = self._hex_escape(escaped)
            return ((point, point),)
        if escaped == "c":
            letter = self._next()
            if not (letter.isascii() and letter.isalpha()):
                raise PatternError("'\\c' needs a letter")
            return ((ord(letter) % 32, ord(letter) % 32),)
        if escaped in "pP":
            raise PatternError("Unicode classes such as '\\p{L}' are not supported")
        if escaped.isalnum():
            raise PatternError(f"the escape '\\{escaped}' is not supported")
        return ((ord(escaped), ord(escaped)),)

    def _hex_escape(self, kind: str) -> int:
        if kind == "u" and self._take("{"):
            end = self._pattern.find("}", self._at)
            return self._hex_number(max(end - self._at, 0), 1)
        point = self._hex_number(2 if kind == "x" else 4)
        if 0xD800 <= point <= 0xDBFF and self._take("\\u"):
            low = self._hex_number(4)
            if 0xDC00 <= low <= 0xDFFF:
                return 0x10000 + ((point - 0xD800) << 10) + low - 0xDC00
        if 0xD800 <= point <= 0xDFFF:
            raise PatternError("half of a surrogate pair is no character")
        return point

    def _hex_number(self, count: int, after: int = 0) -> int:
        digits = self._pattern[self._at : self._at + count]
        self._at += count + after
        try:
            point = int(digits, 16) if len(digits) == count and digits.isalnum() else -1
        except ValueError:
            point = -1
        if not 0 <= point <= _LAST:
            raise PatternError("an escape has no hexadecimal number of a character")
        return point

    def _class(self) -> tuple[Range, ...]:
        is_negated = self._take("^")
        if self._peek("]"):
            raise PatternError("an empty class, or ']' first in one, is not supported; escape it")
        ranges: list[Range] = []
        while not self._take("]"):
            first = self._class_item(is_negated)
            if self._peek("-") and not self._peek("-]") and _is_single(first):
                self._next()
                last = self._class_item(is_negated)
                if not _is_single(last) or last[0][0] < first[0][0]:
                    raise PatternError("a range in a class is in the wrong order")
                first = ((first[0][0], last[0][0]),)
            ranges += first
        found = tuple(ranges)
        return _complement(found) if is_negated else found

    def _class_item(self, is_negated: bool) -> tuple[Range, ...]:
        for mark in ("[:", "[.", "[=", "&&", "--", "~~", "||"):
            if self._peek(mark):
                raise PatternError(f"{mark!r} in a class is not supported; escape it")
        character = self._next()
        if character != "\\":
            return ((ord(character), ord(character)),)
        escaped = self._next()
        if escaped == "b":
            return ((8, 8),)
        if escaped in "123456789":
            raise PatternError("octal escapes are not supported")
        return self._escaped(escaped, is_negated)


def _single(point: int) -> _Chars:
    return _Chars(((point, point),))


def _is_single(ranges: tuple[Range, ...]) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    found: list[Range] = []
    start = 0
    for first, last in sorted(ranges):
        if start < first:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return (*found, (start, _LAST)) if start <= _LAST else tuple(found)


def _common(ranges: tuple[Range, ...], others: tuple[Range, ...]) -> tuple[Range, ...]:
    pairs = ((max(a, c), min(b, d)) for a, b in sorted(ranges) for c, d in others)
    return tuple((first, last) for first, last in pairs if first <= last)


def _spelled(point: int) -> str:
    if point < 0x80 and chr(point).isalnum():
        return chr(point)
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def _class_of(ranges: tuple[Range, ...]) -> str:
    spelled = (
        _spelled(first) if first == last else f"{_spelled(first)}-{_spelled(last)}"
        for first, last in ranges
    )
    return f"[{''.join(spelled)}]"


def _text_unit(ranges: tuple[Range, ...]) -> str:
    """EBNF for one of the characters in a plain text."""
    found = _common(ranges, _TEXT)
    if not found:
        raise PatternError("a class has no characters")
    return _class_of(found)


def _raw_unit(ranges: tuple[Range, ...]) -> str:
    return _text_unit(_common(ranges, _RAW))


def _json_unit(ranges: tuple[Range, ...]) -> str:
    """EBNF for one of the characters in a JSON string, escaped where it must be."""
    raw = _common(ranges, _RAW)
    choices = [_class_of(raw)] if raw else []
    controls = [p for p in (*range(0x20), 0x22, 0x5C) if any(a <= p <= b for a, b in ranges)]
    short = "".join(_spelled(ord(_SHORT_ESCAPES[p])) for p in controls if p in _SHORT_ESCAPES)
    if short:
        choices.append(f'"\\\\" [{short}]')
    for tens in (0, 1):
        digits = "".join(
            f"{p % 16:x}" for p in controls if p not in _SHORT_ESCAPES and p // 16 == tens
        )
        if digits:
            choices.append(f'"\\\\u00{tens}" [{digits}]')
    if not choices:
        raise PatternError("a class has no characters")
    return choices[0] if len(choices) == 1 and raw else f"({' | '.join(choices)})"


class _Writer:
    """Writes a pattern as EBNF.

    Args:
        unit: writes one of some characters.
        around: EBNF for what may stand before and after an end without an anchor.
    """

    def __init__(self, unit: Unit, around: str) -> None:
        self._unit = unit
        self._around = around

    def write(self, node: _Node, is_first: bool, is_last: bool) -> str:
        """Args: whether nothing but what may stand around precedes or follows the node."""
        is_free = bool(self._around) and (is_first or is_last)
        match node:
            case _Choice(branches) if all(map(_is_class, branches)):
                return self.write(_Chars(_union(branches)), is_first, is_last)
            case _Choice(branches):
                written = (self.write(branch, is_first, is_last) for branch in branches)
                return f"({' | '.join(written)})"
            case _Sequence(items):
                return self._sequence(list(items), is_first, is_last)
            case _Anchor():
                raise PatternError("an anchor in the middle of the pattern is not supported")
            case _Repeat(_, 0, _) if is_free:
                return self._around
            case _Repeat(item, 1, _) if is_free:
                return self.write(item, is_first, is_last)
            case _Repeat(item, low, high):
                high = low if is_free else high  # what stands around has the rest
                inner = self.write(item, False, False)
                bounds = f"{{{low},{'' if high is None else f' {high}'}}}"
                found = '""' if high == 0 else f"({inner}){_STARS.get((low, high), bounds)}"
            case _Chars(ranges):
                found = self._unit(ranges)
                if self._around and is_first and is_last:
                    return " ".join(filter(None, (self._without(ranges), found, self._around)))
        sides = (self._around if is_first else "", found, self._around if is_last else "")
        return " ".join(filter(None, sides))

    def _without(self, ranges: tuple[Range, ...]) -> str:
        """What stands before the first of some characters, so that there is one way to read it."""
        others = _common(_complement(ranges), _TEXT)
        return f"{self._unit(others)}*" if others else ""

    def _sequence(self, items: list[_Node], is_first: bool, is_last: bool) -> str:
        starts, ends = is_first, is_last
        while items and starts and items[0] == _Anchor(True):
            items, is_first = items[1:], False
        while items and ends and items[-1] == _Anchor(False):
            items, is_last = items[:-1], False
        if not items:
            return (self._around if is_first or is_last else "") or '""'
        end = len(items) - 1
        return " ".join(
            self.write(item, is_first and i == 0, is_last and i == end)
            for i, item in enumerate(items)
        )


def _is_class(node: _Node) -> bool:
    return isinstance(node, _Chars) or (
        isinstance(node, _Sequence) and len(node.items) == 1 and _is_class(node.items[0])
    )


def _union(classes: Iterable[_Node]) -> tuple[Range, ...]:
    found: list[Range] = []
    for node in classes:
        while isinstance(node, _Sequence):
            node = node.items[0]
        assert isinstance(node, _Chars)
        found += node.ranges
    return _complement(_complement(found))


_STARS = {(0, None): "*", (1, None): "+", (0, 1): "?"}
