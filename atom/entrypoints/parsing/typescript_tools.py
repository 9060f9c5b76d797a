"""Tools as TypeScript: how Kimi K2.5, K2.6 and K2.7-Code are told of them.

Source: the rule of the checkpoints' tokenizers, which give it to the chat template as
`tools_ts_str`. Keys are sorted, required parameters come first, and what stands behind a `$ref` is
an interface. A set of tools that holds what the rule has no words for (`oneOf`, `allOf`, `const`, a
schema without a type, references elsewhere than into `$defs`) is told as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atom.quoting import excerpt, quote

# The variable of the chat template.
VARIABLE = "tools_ts_str"

_INDENT = "  "
# Keywords that a comment spells.
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_NAMES = {"integer": "number", "object": "{}", "array": "Array<any>"}
_SCALARS = ("string", "number", "integer", "boolean", "null")
_VALUES: dict[Any, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}
_ROOT = "parameters"


def sort_keys(value: Any) -> Any:
    """A copy of JSON data with the keys of all objects sorted."""
    if isinstance(value, Mapping):
        return {key: sort_keys(item) for key, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [sort_keys(item) for item in value]
    return value


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The declarations of tools in OpenAI's shape.

    Raises:
        ValueError: for a schema that the rule has no words for.
    """
    functions = [_Function(sort_keys(tool["function"])).declaration() for tool in tools]
    lines = ["# Tools", "", "## functions", "namespace functions {", *functions, "}", ""]
    return "\n".join(lines)


class _Function:
    """One function's declaration, with the interfaces that its parameters refer to."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._definitions: dict[str, Any] = {}
        self._refers_to_root = False

    def declaration(self) -> str:
        parameters = self._function.get("parameters") or {}
        written = self._object(parameters, "")
        lines = []
        if self._refers_to_root:
            fields = list(self._fields(parameters, _INDENT, required_first=False))
            lines.append(f"interface {_ROOT} {_braced(fields, '')}")
            written = _ROOT
        # Those of a definition itself are known to it, and have no interface.
        for name, schema in list(self._definitions.items()):
            if not isinstance(schema, Mapping):
                raise ValueError(f"{json.dumps(schema)} in $defs is no object")
            lines += _comment(schema.get("description"), "")
            lines.append(f"interface {name} {self._type(schema, '')}")
        lines += _comment(self._function.get("description"), "")
        name = self._function.get("name", "function")
        lines.append(f"type {name} = (_: {written}) => any;")
        return "\n".join(lines)

    def _type(self, schema: Any, indent: str) -> str:
        if schema is True or schema == {}:
            return "any"
        if schema is False:
            return "null"
        if not isinstance(schema, Mapping):
            raise ValueError(f"{excerpt(json.dumps(schema))} is no schema")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(branch, indent) for branch in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(map(_union_name, kind))
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if not isinstance(kind, str):
            raise ValueError(f"no TypeScript for {excerpt(json.dumps(schema))}")
        return "number" if kind == "integer" else kind

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions.update(schema.get("$defs") or {})
        inner = indent + _INDENT
        rest = schema.get("additionalProperties")
        fields = list(self._fields(schema, inner, required_first=True))
        if rest is not None:
            written = "never" if rest is False else self._type(rest, inner)
            fields.append(f"{inner}[k: string]: {written}")
        return _braced(fields, indent)

    def _fields(
        self, schema: Mapping[str, Any], indent: str, *, required_first: bool
    ) -> Iterator[str]:
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        names = list(properties)
        if required_first:
            names.sort(key=lambda name: name not in required)
        for name in names:
            field = properties[name]
            lines = _comments(field, indent)
            default = field.get("default") if isinstance(field, Mapping) else None
            if default is not None:
                lines.append(f"{indent}// Default: {_default(default)}")
            mark = "" if name in required else "?"
            lines.append(f"{indent}{name}{mark}: {self._type(field, indent)}")
            yield "\n".join(lines)

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items") or {}
        inner = indent + _INDENT
        comments = _comments(items, inner)
        if not comments:
            return f"Array<{self._type(items, indent)}>"
        return "\n".join(["Array<", *comments, f"{inner}{self._type(items, inner)}", f"{indent}>"])

    def _reference(self, reference: Any) -> str:
        if reference == "#":
            self._refers_to_root = True
            return _ROOT
        name = str(reference).rpartition("/")[2]
        if not str(reference).startswith("#/$defs/") or name not in self._definitions:
            raise ValueError(f"$ref {quote(str(reference))} leads to none of the $defs")
        return name


def _braced(fields: list[str], indent: str) -> str:
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _comments(schema: Any, indent: str) -> list[str]:
    """The lines before a field: what its schema says of it."""
    if not isinstance(schema, Mapping):
        return []
    lines = _comment(schema.get("description"), indent)
    is_plain = not schema.keys() & {"$ref", "anyOf", "enum"}
    kind = schema.get("type")
    bounds = _BOUNDS.get(kind, ()) if is_plain and isinstance(kind, str) else ()
    told = ", ".join(f"{name}: {schema[name]}" for name in bounds if name in schema)
    return [*lines, f"{indent}// {told}"] if told else lines


def _comment(text: Any, indent: str) -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


def _default(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float)) else json.dumps(value, ensure_ascii=False)


def _enum(schema: Mapping[str, Any]) -> str:
    """The values, which are of the type that the schema may name beside null."""
    kinds = schema.get("type", [])
    kinds = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) else [kinds]
    if len(kinds) > 1:
        raise ValueError(f"no TypeScript for an enum of the types {', '.join(map(str, kinds))}")
    wanted = _VALUES.get(kinds[0]) if kinds else None
    for value in schema["enum"]:
        if wanted is not None and value is not None and not isinstance(value, wanted):
            raise ValueError(f"the enum's {excerpt(json.dumps(value))} is no {kinds[0]}")
    return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in schema["enum"])


def _union_name(kind: Any) -> str:
    if kind not in _NAMES and kind not in _SCALARS:
        raise ValueError(f"no TypeScript for the type {quote(str(kind))}")
    return _NAMES.get(kind, str(kind))
