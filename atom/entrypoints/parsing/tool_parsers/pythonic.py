"""Llama 4, Llama 3.2 and OLMo 3: calls in Python's spelling, `[name(key="value"), ...]`.

Source: the checkpoints' prompt format guides. An answer's content begins with calls or holds
none, unless markers precede them. A call's arguments come when it is whole.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping

from atom.entrypoints.parsing.calls.base import ToolFormat
from atom.entrypoints.parsing.calls.call_grammar import CallGrammar
from atom.entrypoints.parsing.calls.typed_arguments import spell
from atom.entrypoints.parsing.deltas import DeltaWriter
from atom.entrypoints.parsing.text_stream import Steps, TextStream
from atom.structured_output.tags import Format, literal, one_of, sequence

PYTHON = ("<|python_start|>", "<|python_end|>")
SECTION = ("<function_calls>", "</function_calls>")

_NO_NAME = re.compile(r"[^\w.-]")
_FLOAT = re.compile(r"(-?)([0-9]*)\.?([0-9]*)((?:[eE][+-]?[0-9]+)?)")
_CONSTANTS = {"true": True, "false": False, "null": None}
# Of a schema whose properties can be written one by one.
_PLAIN = {"type", "properties", "required", "additionalProperties", "title", "description"}
# Of a call whose schema names none.
_MOST_KEYWORDS = 63
_UNBRACKETED: Format = {"type": "regex", "pattern": r"\s*([^\s\[][\s\S]*)?"}


def _call(name: str, arguments: Format) -> Format:
    """Properties in their order; `**{...}` where the schema says more than properties."""
    schema = arguments["json_schema"]
    properties = schema.get("properties")
    if not properties and schema.keys() <= _PLAIN and schema.get("additionalProperties", True):
        return one_of([_mapping(name, arguments), _keywords(name, arguments)])
    if not properties or not schema.keys() <= _PLAIN:
        return _mapping(name, arguments)
    required = [key for key in properties if key in schema.get("required", ())]
    others = [key for key in properties if key not in required]

    def written(key: str, comma: bool) -> Format:
        value = {**arguments, "json_schema": properties[key]}
        return sequence(literal(f"{', ' if comma else ''}{key}="), value)

    def rest(keys: list[str]) -> list[Format]:
        return [{"type": "optional", "content": written(key, True)} for key in keys]

    if required:
        parts = [written(key, i > 0) for i, key in enumerate(required)]
        inside = sequence(*parts, *rest(others))
    else:
        starts = [
            sequence(written(key, False), *rest(others[i + 1 :])) for i, key in enumerate(others)
        ]
        inside = one_of([literal(""), *starts])
    return sequence(literal(f"{name}("), inside, literal(")"))


def _mapping(name: str, arguments: Format) -> Format:
    return sequence(literal(f"{name}(**"), arguments, literal(")"))


def _keywords(name: str, arguments: Format) -> Format:
    """Any arguments, by name."""
    value = {**arguments, "json_schema": {}}
    pair = sequence({"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]*="}, value)
    following = sequence(literal(", "), pair)
    more = {"type": "repeat", "min": 0, "max": _MOST_KEYWORDS, "content": following}
    inside = one_of([literal(""), sequence(pair, more)])
    return sequence(literal(f"{name}("), inside, literal(")"))


class Pythonic(ToolFormat):
    template_texts = (
        ("<|python_start|>",),
        ("<function_calls>", "tool_calls"),
        ("func_name1(params_name1=params_value1",),
    )
    model_types = ("llama4", "olmo3")
    grammar = CallGrammar(
        _call,
        separator=", ",
        section=None,
        head=literal("["),
        tail=literal("]"),
        text=_UNBRACKETED,
        takes_json=False,
    )
    markers = (*PYTHON, *SECTION)
    opening = frozenset({PYTHON[0], SECTION[0]})

    def read(self, opening: str, text: TextStream, out: DeltaWriter) -> Steps[str | None]:
        out.marker()
        yield from self._read_calls(text, out, is_marked=True)
        del opening
        return None

    def begin(self, text: TextStream, out: DeltaWriter) -> Steps[None]:
        yield from self._read_calls(text, out, is_marked=False)

    def _read_calls(self, text: TextStream, out: DeltaWriter, *, is_marked: bool) -> Steps[None]:
        held: list[str] = []  # content, where no call follows
        char = yield from text.skip_space(held.append)
        if char == "[":
            yield from text.scan(_one, held.append)
        elif not is_marked:
            out.content("".join(held))
            return
        while True:
            yield from text.skip_space(held.append)
            pieces: list[str] = []
            yield from text.scan(_name_end, pieces.append)
            name = "".join(pieces)
            held.append(name)
            if not name or (self.tools and name not in self.tools):
                break
            if (yield from text.skip_space(held.append)) != "(":
                break
            held.clear()
            yield from self._read_call(name, text, out)
            yield from text.skip_space()
            yield from text.accept(",")
        content = "".join(held)
        if not content.strip() and (yield from text.accept("]")):
            out.marker()
        elif content:
            out.content(content)

    def _read_call(self, name: str, text: TextStream, out: DeltaWriter) -> Steps[None]:
        out.begin_call(name)
        pieces: list[str] = []
        if (yield from text.scan(_Brackets().find_end, pieces.append)):
            inside = "".join(pieces)
            out.arguments(as_json(inside) or inside)
            out.end_call()


class _Brackets:
    """Finds the end of what a bracket opens."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int:
        for i in range(start, len(text)):
            char = text[i]
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return -1


def as_json(arguments: str) -> str | None:
    """Python's `(key=value, ...)` as a JSON object; None where it is not such."""
    source = f"f{arguments}"
    try:
        call = ast.parse(source, mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            return None
        values: dict[str, str] = {}
        for keyword in call.keywords:
            if keyword.arg is not None:
                values[keyword.arg] = _spell(keyword.value, source)
            else:
                values.update(_entries(keyword.value, source))
        return _object(values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _spell(node: ast.expr, source: str) -> str:
    """The JSON of a value that Python writes.

    Raises:
        ValueError, TypeError: where it is no such value.
    """
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return json.dumps(_CONSTANTS[node.id])
    if isinstance(node, ast.List | ast.Tuple):
        return f"[{', '.join(_spell(item, source) for item in node.elts)}]"
    if isinstance(node, ast.Dict):
        return _object(_entries(node, source))
    value = ast.literal_eval(node)
    if isinstance(value, float) and math.isinf(value):  # JSON knows no largest number
        return _beyond_floats(ast.get_source_segment(source, node) or "")
    return spell(value)


def _beyond_floats(text: str) -> str:
    found = _FLOAT.fullmatch(text.replace("_", ""))
    if found is None:
        raise ValueError(f"{text} is no number")
    sign, whole, part, exponent = found.groups()
    return f"{sign}{whole.lstrip('0') or '0'}{part and '.' + part}{exponent}"


def _entries(node: ast.expr, source: str) -> dict[str, str]:
    if not isinstance(node, ast.Dict):
        raise TypeError("only a dictionary has entries")
    pairs = zip(node.keys, node.values, strict=True)
    return {_key(key): _spell(value, source) for key, value in pairs if key is not None}


def _key(node: ast.expr) -> str:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return str(_CONSTANTS[node.id])
    return str(ast.literal_eval(node))


def _object(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{spell(name)}: {value}" for name, value in values.items()) + "}"


def _name_end(text: str, start: int) -> int:
    match = _NO_NAME.search(text, start)
    return -1 if match is None else match.start()


def _one(text: str, start: int) -> int:
    return start + 1 if start < len(text) else -1
