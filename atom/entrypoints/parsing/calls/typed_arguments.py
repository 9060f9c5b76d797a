"""Arguments that models write as text, a parameter at a time: JSON by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from atom.entrypoints.parsing.calls.parameter_schemas import (
    ParameterSchemas,
    type_of,
)
from atom.entrypoints.parsing.deltas import DeltaWriter

_STRING = frozenset({"string"})


class TypedArguments:
    """Writes the arguments of a call that has begun; strings stream, other values come whole.

    Args:
        schema: of the tool's parameters; what it does not describe is a string.
    """

    def __init__(self, schema: Mapping[str, Any], out: DeltaWriter) -> None:
        self._schemas = ParameterSchemas(schema)
        self._out = out
        self._text: list[str] | None = None
        self._schema: Any = None
        self._has_begun = False

    def begin(self, name: str, kind: str | None = None) -> None:
        """A parameter's value follows.

        Args:
            kind: the type that the model says it has, if it does; the schema decides what that
                may be.
        """
        schema = self._schemas.of(name)
        if schema is None:
            schema = {"type": "string" if kind is None else kind}
        elif kind is not None:
            narrowed = {"allOf": [schema, {"type": kind}]}
            schema = narrowed if self._schemas.types(narrowed) else schema
        self._schema = schema
        is_string = self._schemas.types(self._schema) == _STRING
        self._out.arguments("{" if not self._has_begun else ", ")
        self._out.arguments(json.dumps(name, ensure_ascii=False) + ": ")
        self._has_begun = True
        self._text = None if is_string else []
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
            self._out.arguments(as_json("".join(self._text), self._schema, self._schemas))

    def whole(self, text: str) -> None:
        """The next piece of all arguments, in JSON."""
        self._out.arguments(text)

    def finish(self) -> None:
        """So is the call."""
        if self._has_begun:
            self._out.arguments("}")


def as_json(text: str, schema: Any, schemas: ParameterSchemas) -> str:
    """A value as JSON text: the first reading of it that fits the schema, else the first one of an
    allowed type, else a string.

    Read are JSON other than strings, and Python's spelling of it; the text as a string; and a
    string in quotes.
    """
    types = schemas.types(schema)
    first = None
    for value, spelled in _readings(text, types):
        if type_of(value) not in types:
            continue
        if schemas.fits(value, schema):
            return spelled
        first = spelled if first is None else first
    return json.dumps(text, ensure_ascii=False) if first is None else first


def _readings(text: str, types: frozenset[str]) -> Iterator[tuple[Any, str]]:
    """What a text may say, and its JSON."""
    stripped = text.strip()
    quoted = []
    for read in (_json, _python):
        try:
            value = read(stripped)
            spelled = spell(value) if read is _python else stripped
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        if isinstance(value, str):
            quoted.append((value, spelled))
        elif isinstance(value, float) and type_of(value) == "integer" and "number" not in types:
            yield value, str(int(value))
        else:
            yield value, spelled
    yield text, json.dumps(text, ensure_ascii=False)
    yield from quoted


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _python(text: str) -> Any:
    return ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(text, text))


def spell(value: Any) -> str:
    """The JSON of a value.

    Raises:
        ValueError, TypeError: where it has none.
    """
    spelled = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair is no text.
    return spelled.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
