"""What a tool's schema says of its parameters: the JSON types of values that come as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from atom.structured_output.schema.json_schema import KEYWORDS_OF_TYPES
from atom.structured_output.schema.pointer import resolve_pointer

_ALL = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_NONE: frozenset[str] = frozenset()
# An integer is a number, and some clients spell types as Python does.
_NAMED: dict[Any, frozenset[str]] = {
    **{name: frozenset({name}) for name in _ALL},
    "number": frozenset({"number", "integer"}),
    "str": frozenset({"string"}),
    "int": frozenset({"integer"}),
    "float": frozenset({"number", "integer"}),
    "bool": frozenset({"boolean"}),
    "list": frozenset({"array"}),
    "dict": frozenset({"object"}),
    "any": _ALL,
}
# How deep schemas are followed; what lies deeper may be anything.
_MAX_DEPTH = 64


class ParameterSchemas:
    """The schemas of a tool's parameters, behind references and combinations.

    Args:
        root: the schema of all parameters, to which references lead.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._types_of_references: dict[str, frozenset[str]] = {}

    def of(self, name: str) -> Any:
        """The schema of a parameter; None where nothing is said of it."""
        found = self._find(name, self._root, set())
        if not found:
            return None
        return found[0] if len(found) == 1 else {"anyOf": found}

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a schema allows, all where it does not say."""
        if not isinstance(schema, Mapping):
            return _NONE if schema is False else _ALL
        if depth > _MAX_DEPTH:
            return _ALL
        told = [types for types in self._told(schema, depth + 1) if types != _ALL]
        if not told:
            about = [
                kind for kind, names in KEYWORDS_OF_TYPES.items() if schema.keys() & set(names)
            ]
            return _union(_NAMED[kind] for kind in about) if about else _ALL
        allowed = frozenset.intersection(*told)
        return allowed | {"null"} if schema.get("nullable") is True else allowed

    def fits(self, value: Any, schema: Any, depth: int = 0) -> bool:
        """Whether a value has a type that the schema allows, and is one of those it lists."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return schema is not False
        if type_of(value) not in self.types(schema):
            return False
        if value is None and schema.get("nullable") is True:
            return True
        listed = _listed(schema)
        if listed is not None and not any(_same(value, other) for other in listed):
            return False
        for keyword, combine in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            branches = _branches(schema, keyword)
            if branches and not combine(self.fits(value, part, depth + 1) for part in branches):
                return False
        target = self._target(schema)
        return target is None or self.fits(value, target, depth + 1)

    def _told(self, schema: Mapping[str, Any], depth: int) -> Iterable[frozenset[str]]:
        """What each keyword that tells of types allows."""
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            yield _union(_NAMED.get(kind, _NAMED["string"]) for kind in map(str, kinds))
        listed = _listed(schema)
        if listed is not None:
            yield frozenset(filter(None, map(type_of, listed)))
        for keyword in ("anyOf", "oneOf"):
            if branches := _branches(schema, keyword):
                yield _union(self.types(branch, depth) for branch in branches)
        for branch in _branches(schema, "allOf"):
            yield self.types(branch, depth)
        if isinstance(reference := schema.get("$ref"), str):
            yield self._types_behind(reference, schema, depth)

    def _types_behind(
        self, reference: str, schema: Mapping[str, Any], depth: int
    ) -> frozenset[str]:
        known = self._types_of_references
        if reference not in known:
            known[reference] = _NONE  # what leads back to itself adds nothing
            known[reference] = self.types(self._target(schema), depth)
        return known[reference]

    def _find(self, name: str, schema: Any, seen: set[int]) -> list[Any]:
        """What the parts of a schema of objects say of a property."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return []
        seen.add(id(schema))
        found = []
        properties, rest = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and name in properties:
            found.append(properties[name])
        elif isinstance(rest, Mapping):
            found.append(rest)
        for keyword in ("anyOf", "oneOf", "allOf"):
            for branch in _branches(schema, keyword):
                found += self._find(name, branch, seen)
        return found + self._find(name, self._target(schema), seen)

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What a reference within the schema leads to; None where it leads nowhere."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        return resolve_pointer(self._root, reference)


def type_of(value: Any) -> str | None:
    """The narrowest type of a value of JSON; None for what is no such value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        if isinstance(value, float) and math.isinf(value):
            return "number"  # written with an exponent that floats do not have
        return "integer" if value == int(value) else "number"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds.get(type(value))


def _branches(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    branches = schema.get(keyword)
    return branches if isinstance(branches, list) else []


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON, of which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return _NONE.union(*sets)
