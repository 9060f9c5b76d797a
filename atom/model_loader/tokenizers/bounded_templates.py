"""Jinja's sandbox without what takes a server's time or memory: templates come from checkpoints.

All loops of a text have so many turns together. Operators, filters and methods make no text or list
of more than so many parts, nor more than so many together, and no number of more than so many bits.
A text takes so much of a processor at most. That is looked at between turns, operators, filters and
calls; what one of these takes follows from the parts that it is given.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from jinja2.nodes import Concat, Expr, Filter, For, List
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Turns of all loops of one text: a conversation of 10,000 messages, each looked at 100 times.
_MOST_TURNS = 1_000_000
# Seconds of a processor, and steps until these are looked at again.
_MOST_SECONDS, _LOOK_AFTER = 5.0, 64
# Parts of what is made at once, bits of numbers, and what JSON is indented by.
_MOST_ITEMS, _MOST_BITS, _MOST_INDENT = 1 << 24, 1 << 16, 64
# Parts of all that is made for one text, those of lists counting more: a text that grows to a
# million characters by a thousand messages takes as many.
_MOST_MADE, _OF_LIST, _SHORT = 1 << 29, 32, 64
# What filters that work on each part in Python are given at most.
_MOST_LOOKED_AT = 1 << 20
_SLOW_FILTERS = (
    *("batch", "dictsort", "groupby", "map", "max", "min", "pprint", "reject", "rejectattr"),
    *("select", "selectattr", "slice", "sort", "striptags", "sum", "title", "unique", "urlencode"),
    *("urlize", "wordcount", "wordwrap", "xmlattr"),
)
# Names of filters that no template can write.
_COUNTED, _JOINED = "counted turns", "joined parts"
_WIDTHS = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")
_FORMAT_WIDTHS = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{5})")


@dataclass
class _Left:
    """What a text may still take: turns and parts, and processor time until `end`."""

    turns: int = _MOST_TURNS
    made: int = _MOST_MADE
    end: float = field(default_factory=lambda: time.thread_time() + _MOST_SECONDS)
    unlooked: int = 0

    def look(self, num_parts: int = 0) -> None:
        """Look at the clock, once there were some steps, or one with many parts."""
        self.unlooked += 1 + (num_parts >> 10)
        if self.unlooked < _LOOK_AFTER:
            return
        self.unlooked = 0
        if time.thread_time() > self.end:
            raise TemplateError(f"the template takes more than {_MOST_SECONDS:g} s of a processor")


_left: ContextVar[_Left] = ContextVar("what a text may still take")


@contextmanager
def one_text() -> Iterator[None]:
    """What is rendered inside has the bounds of one text."""
    token = _left.set(_Left())
    try:
        yield
    finally:
        _left.reset(token)


def _check(size: int, what: str, weight: int = 1) -> None:
    left = _left.get()
    left.look(size)
    left.made -= size * weight
    if size > _MOST_ITEMS or left.made < 0:
        raise TemplateError(f"the template {what} to {size} parts")


def _count(made: Any) -> Any:
    """What a filter or a call has made; short texts take memory only in lists, which count."""
    if isinstance(made, str):
        if len(made) > _SHORT:
            _check(len(made), "turns something")
    elif isinstance(made, (list, tuple, dict)):
        _check(len(made), "turns something", _OF_LIST)
    return made


def _check_bits(count: float) -> None:
    if count > _MOST_BITS:
        raise TemplateError(f"the template computes a number of {count:.0f} bits")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; render inside `one_text`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.filters[_COUNTED] = _counted
        self.filters[_JOINED] = _joined
        for name, filter in list(self.filters.items()):
            self.use_filter(name, filter)

    def use_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """Use another filter of a name that is bounded."""
        self.filters[name] = _checked(filter, _FILTER_CHECKS.get(name), name in _SLOW_FILTERS)

    def _parse(self, *args: Any) -> Any:
        tree = super()._parse(*args)
        for loop in list(tree.find_all(For)):
            loop.iter = Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return _Concatenations().visit(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _left.get().look()
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            _check_bits(sum(bits) if operator == "*" else bits[0] * min(right, _MOST_BITS))
        if operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and isinstance(repeated, (str, list, tuple)):
                weight = 1 if isinstance(repeated, str) else _OF_LIST
                _check(count * len(repeated), "repeats something", weight)
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            weight = 1 if isinstance(left, str) else _OF_LIST
            _check(len(left) + len(right), "adds something", weight)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    # Jinja's own names of arguments, which a template's must not meet.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(__obj, "__self__", None)
        check = _METHOD_CHECKS.get(getattr(__obj, "__name__", ""))
        if isinstance(text, str) and check is not None:
            check(text, *args, *kwargs.values())
        return _count(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        is_format = getattr(value, "__name__", "") in ("format", "format_map")
        if is_format and isinstance(text, str) and _FORMAT_WIDTHS.search(text):
            raise TemplateError("the template formats to a width that is computed or large")
        return super().wrap_str_format(value)


class _Concatenations(NodeTransformer):
    """`a ~ b` becomes a filter, since nothing intercepts the operator."""

    def visit_Concat(self, node: Concat) -> Expr:
        self.generic_visit(node)
        parts = List(node.nodes, lineno=node.lineno)
        joined = Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)
        joined.environment = parts.environment = node.environment
        return joined


def _counted(items: Any) -> Iterator[Any]:
    """The items of a loop, as long as all loops of the text have turns left."""
    left = _left.get()
    for item in items:
        left.look()
        left.turns -= 1
        if left.turns < 0:
            raise TemplateError(f"the template's loops take more than {_MOST_TURNS} turns")
        yield item


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    _check(sum(map(len, texts)), "joins something")
    return "".join(texts)


def _checked(
    filter: Callable[..., Any], check: Callable[..., None] | None, is_slow: bool
) -> Callable[..., Any]:
    """A filter whose value and arguments are looked at first, and what it makes then."""
    if check is None and not is_slow:
        return functools.wraps(filter)(lambda *args, **kwargs: _count(filter(*args, **kwargs)))
    first = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @functools.wraps(filter)
    def call(*args: Any, **kwargs: Any) -> Any:
        context, (value, *others) = args[:first], args[first:]
        if check is not None:
            if isinstance(value, Iterator):
                value = list(value)
            check(value, *others, *kwargs.values())
        if is_slow:
            size = len(value) if isinstance(value, Sized) else 0
            _left.get().look(size)
            if size > _MOST_LOOKED_AT:
                raise TemplateError(f"the template looks at {size} parts of something")
        return _count(filter(*context, value, *others, **kwargs))

    return call


def _numbers(arguments: Iterable[Any]) -> int:
    """The largest of the numbers among arguments, at least 0."""
    return max((int(a) for a in arguments if isinstance(a, (int, float))), default=0)


def _texts(arguments: Iterable[Any]) -> int:
    """The length of the longest text among arguments, at least 0."""
    return max((len(a) for a in arguments if isinstance(a, str)), default=0)


def _check_pad(value: Any, *arguments: Any) -> None:
    del value
    _check(_numbers(arguments), "pads something")


def _check_lines(value: Any, *arguments: Any) -> None:
    """Each line or tab, or each value, gets so much more."""
    text = str(value)
    count = text.count("\n") + text.count("\t") + 1
    _check(len(text) + count * max(_numbers(arguments), _texts(arguments)), "indents something")


def _check_json(value: Any, *arguments: Any) -> None:
    if max(_numbers(arguments), _texts(arguments)) > _MOST_INDENT:
        raise TemplateError(f"the template indents JSON by more than {_MOST_INDENT}")
    del value


def _check_replace(value: Any, old: Any, new: Any, *_: Any) -> None:
    text, old, new = str(value), str(old), str(new)
    _check(len(text) + (text.count(old) if old else len(text) + 1) * len(new), "replaces something")


def _check_join(value: Any, *arguments: Any) -> None:
    """Also of a method, where the text stands between the parts."""
    if isinstance(value, str) and arguments and not isinstance(arguments[0], (str, int)):
        parts, between = list(arguments[0]), len(value)
    else:
        parts, between = list(value), _texts(arguments)
    _check(sum(len(str(part)) + between for part in parts), "joins something")


def _check_wrap(value: Any, *arguments: Any) -> None:
    """A line may be one character."""
    _check(len(str(value)) * (1 + _texts(arguments)), "wraps something")


def _check_format(value: Any, *_: Any) -> None:
    if _WIDTHS.search(str(value)):
        raise TemplateError("the template formats to a width that is computed or large")


_METHOD_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_pad),
    "expandtabs": _check_lines,
    "replace": _check_replace,
    "join": _check_join,
}
_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "batch", "slice"), _check_pad),
    "indent": _check_lines,
    "tojson": _check_json,
    "replace": _check_replace,
    "join": _check_join,
    "wordwrap": _check_wrap,
    "format": _check_format,
}
