"""Jinja's sandbox without what takes a server's time or memory: templates come from checkpoints.

All loops of a text have so many turns together. Operators, and filters and methods that repeat,
pad, join or replace, make no text or list of more than so many parts, nor more than so many
together.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError
from jinja2.nodes import Concat, Expr, Filter, For, List
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Turns of all loops of one text: a conversation of 10,000 messages, each looked at 100 times.
_MOST_TURNS = 1_000_000
# Parts of what is made at once, and exponents.
_MOST_ITEMS, _MOST_POWER = 1 << 24, 64
# Parts of all that operators and the filters below make for one text: one that grows to a million
# characters by a thousand messages takes as many.
_MOST_MADE = 1 << 29
# Names of filters that no template can write.
_COUNTED, _JOINED = "counted turns", "joined parts"
_WIDTHS = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")
_FORMAT_WIDTHS = re.compile(r"\{[^{}]*:[^{}]*(\{|\d{5})")
_left: ContextVar[list[int]] = ContextVar("turns and parts left")


@contextmanager
def one_text() -> Iterator[None]:
    """What is rendered inside has the bounds of one text."""
    token = _left.set([_MOST_TURNS, _MOST_MADE])
    try:
        yield
    finally:
        _left.reset(token)


def _check(size: int, what: str) -> None:
    left = _left.get()
    left[1] -= size
    if size > _MOST_ITEMS or left[1] < 0:
        raise TemplateError(f"the template {what} to {size} parts")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; render inside `one_text`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.filters[_COUNTED] = _counted
        self.filters[_JOINED] = _joined
        for name in _FILTER_CHECKS:
            self.use_filter(name, self.filters[name])

    def use_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """Use another filter of a name that is bounded."""
        self.filters[name] = _checked(filter, _FILTER_CHECKS[name])

    def _parse(self, *args: Any) -> Any:
        tree = super()._parse(*args)
        for loop in list(tree.find_all(For)):
            loop.iter = Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return _Concatenations().visit(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and isinstance(repeated, (str, list, tuple)):
                _check(count * len(repeated), "repeats something")
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            _check(len(left) + len(right), "adds something")
        elif operator == "**" and isinstance(right, (int, float)) and abs(right) > _MOST_POWER:
            raise TemplateError(f"the template computes a power of {right}")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    # Jinja's own names of arguments, which a template's must not meet.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(__obj, "__self__", None)
        check = _METHOD_CHECKS.get(getattr(__obj, "__name__", ""))
        if isinstance(text, str) and check is not None:
            check(text, *args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

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
        left[0] -= 1
        if left[0] < 0:
            raise TemplateError(f"the template's loops take more than {_MOST_TURNS} turns")
        yield item


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    _check(sum(map(len, texts)), "joins something")
    return "".join(texts)


def _checked(filter: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter whose value and arguments are looked at first."""
    first = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @functools.wraps(filter)
    def call(*args: Any, **kwargs: Any) -> Any:
        context, (value, *others) = args[:first], args[first:]
        if isinstance(value, Iterator):
            value = list(value)
        check(value, *others, *kwargs.values())
        return filter(*context, value, *others, **kwargs)

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
    if max(_numbers(arguments), _texts(arguments)) > _MOST_POWER:
        raise TemplateError(f"the template indents JSON by more than {_MOST_POWER}")
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
