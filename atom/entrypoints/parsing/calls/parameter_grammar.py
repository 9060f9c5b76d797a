"""Grammars of arguments whose parameters stand between tags, exactly as models write them.

The XML styles of the grammar library leave white space between tags open, and spell as text those
for which a vocabulary has tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atom.entrypoints.parsing.calls.parameter_schemas import type_of
from atom.structured_output.schema.patterns import PatternError, json_rule
from atom.structured_output.tags import ANY_OBJECT, Format, literal, one_of, sequence

# (name, type, value) -> one parameter; the type is that of JSON, without integers.
Tag = Callable[[Format, str, Format], Format]

# Of a schema whose parameters can be written one by one.
_PLAIN = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs"}
_SILENT = {"title", "description", "default", "examples"}
_ANY_NAME: Format = {"type": "regex", "pattern": r'[^"&<>\s]+'}
_KINDS = ("null", "boolean", "number", "array", "object")


_OF_STRINGS = {"type", "minLength", "maxLength", "pattern"}
# A character or two, at the start of what no tag ends.
_UNIT = "(?:[^<]|<[^/])"


class _Unwritable(Exception):
    """A schema with more than types and values."""


@dataclass(frozen=True)
class ParameterGrammar:
    """How a format writes parameters.

    Attributes:
        tag: writes one.
        stops: markers that no value holds.
        escape: a name as it stands in the tag.
    """

    tag: Tag
    stops: Sequence[str]
    escape: Callable[[str], str] = str

    def of(self, arguments: Format) -> Format | None:
        """The parameters in the schema's order; None for a schema that says more than types and
        values of them.
        """
        schema = arguments["json_schema"]
        if schema == ANY_OBJECT:
            anything = [self.tag(_ANY_NAME, *kind) for kind in self._kinds(True, arguments)]
            return {"type": "star", "content": one_of(anything)}
        properties = schema.get("properties")
        if not properties or not schema.keys() <= _PLAIN or '"$ref": "#"' in json.dumps(schema):
            return None
        parts = []
        for name, part in properties.items():
            try:
                kinds = list(self._kinds(part, arguments))
            except (_Unwritable, PatternError, RecursionError):
                return None
            written = one_of([self.tag(literal(self.escape(name)), *kind) for kind in kinds])
            is_required = name in schema.get("required", ())
            parts.append(written if is_required else {"type": "optional", "content": written})
        return sequence(*parts)

    def _kinds(self, schema: Any, arguments: Format) -> Iterator[tuple[str, Format]]:
        """The types that a value may have, and how it is written."""
        definitions = arguments["json_schema"].get("$defs", {})
        free: Format = {"type": "any_tokens", "exclude_tokens": list(self.stops)}
        if schema is True or schema == {}:
            yield "string", free
            for kind in _KINDS:
                yield kind, {**arguments, "json_schema": {"type": kind}}
            return
        if not isinstance(schema, Mapping):
            raise _Unwritable
        told = schema.keys() - _SILENT
        if told == {"$ref"} and (target := definitions.get(schema["$ref"].rpartition("/")[2])):
            yield from self._kinds(target, arguments)
        elif told == {"anyOf"}:
            for branch in schema["anyOf"]:
                yield from self._kinds(branch, arguments)
        elif told <= {"enum", "type"} and "enum" in told:
            yield from map(self._value, schema["enum"])
        elif told <= _OF_STRINGS and schema.get("type") == "string":
            yield "string", _bounded(schema, free)
        elif schema.get("type") in (*_KINDS, "integer"):
            kind = "number" if schema["type"] == "integer" else schema["type"]
            whole = {**schema, "$defs": definitions} if definitions else schema
            yield kind, {**arguments, "json_schema": whole}
        else:
            raise _Unwritable

    def _value(self, value: Any) -> tuple[str, Format]:
        kind = type_of(value) or ""
        written = value if kind == "string" else json.dumps(value, ensure_ascii=False)
        if any(stop in written for stop in self.stops):
            raise _Unwritable
        return "number" if kind == "integer" else kind, literal(written)


def _bounded(schema: Mapping[str, Any], free: Format) -> Format:
    """A text with a pattern or lengths; with both, or with a longest one, it has no quotes,
    backslashes and control characters.
    """
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if "pattern" in schema or longest is not None:
        pattern = schema.get("pattern", r"^[\s\S]*$")
        rule = json_rule(pattern, shortest, longest, is_raw=True)
        return {"type": "grammar", "grammar": f"root ::= {rule}\n"}
    if not shortest:
        return free
    return sequence({"type": "regex", "pattern": f"{_UNIT}{{{int(shortest)}}}"}, free)
