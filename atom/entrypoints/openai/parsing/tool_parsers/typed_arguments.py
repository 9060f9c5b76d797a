"""Arguments that models write as text, a parameter at a time: JSON by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

from atom.entrypoints.openai.chat.deltas import DeltaWriter


class TypedArguments:
    """Writes the arguments of a call that has begun; strings stream, other values come whole.

    Args:
        schema: of the tool's parameters; what it does not describe is a string.
    """

    def __init__(self, schema: Mapping[str, Any], out: DeltaWriter) -> None:
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._out = out
        self._text: list[str] | None = None
        self._types: frozenset[str] = frozenset()
        self._has_begun = False

    def begin(self, name: str) -> None:
        """A parameter's value follows."""
        self._types = _types(self._properties.get(name))
        self._out.arguments("{" if not self._has_begun else ", ")
        self._out.arguments(json.dumps(name, ensure_ascii=False) + ": ")
        self._has_begun = True
        self._text = None if self._types == {"string"} else []
        if self._text is None:
            self._out.arguments('"')

    def feed(self, text: str) -> None:
        """The next piece of the value."""
        if self._text is not None:
            self._text.append(text)
        else:
            self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        """The value is complete."""
        if self._text is None:
            self._out.arguments('"')
        else:
            self._out.arguments(as_json("".join(self._text), self._types))

    def finish(self) -> None:
        """So is the call."""
        if self._has_begun:
            self._out.arguments("}")


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON text: as it is where it is JSON of one of the types, else as a string."""
    stripped = text.strip()
    for read in (json.loads, _python):
        try:
            value = read(stripped)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        if _type_names(value) & types:
            return stripped if read is json.loads else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _python(text: str) -> Any:
    return ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(text, text))


def _type_names(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"} if value == value and abs(value) != float("inf") else set()
    if value is None:
        return {"null"}
    return (
        {"object"} if isinstance(value, dict) else {"array"} if isinstance(value, list) else set()
    )


def _types(schema: Any) -> frozenset[str]:
    """The types that a schema allows; a string where it does not say."""
    if not isinstance(schema, dict):
        return frozenset({"string"})
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(map(str, kinds))
    branches: Iterable[Any] = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    found = frozenset(kind for branch in branches for kind in _types(branch))
    if found:
        return found
    if "enum" in schema or "const" in schema:
        values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
        return frozenset(kind for value in values for kind in _type_names(value) or {"string"})
    # A reference leads to what is rarely a string.
    return frozenset({"object", "array"}) if "$ref" in schema else frozenset({"string"})
