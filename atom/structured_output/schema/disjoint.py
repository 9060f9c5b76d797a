"""Whether no value is valid under two schemas at once, as far as it is easily seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any


def are_disjoint(branches: Sequence[Any], target: Callable[[Any], Any]) -> bool:
    """Whether each pair of the branches certainly excludes one another.

    Args:
        target: follows references.
    """
    return all(_exclude(target(a), target(b), target) for a, b in combinations(branches, 2))


def _exclude(a: Any, b: Any, target: Callable[[Any], Any]) -> bool:
    if a is False or b is False:
        return True
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return False
    types, others = _types(a), _types(b)
    if types is not None and others is not None and not types & others:
        return True
    values, other_values = _values(a), _values(b)
    if values is not None and other_values is not None and not values & other_values:
        return True
    if types != {"object"} or others != {"object"}:
        return False
    if any(_forbids(x, name) for x, y in ((a, b), (b, a)) for name in _required(y)):
        return True
    return any(
        _exclude(
            target(_properties(a).get(name, True)), target(_properties(b).get(name, True)), target
        )
        for name in _required(a) & _required(b)
    )


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """Numbers count as integers too; None if they are not known."""
    given = schema.get("type")
    if given is None:
        values = _values(schema)
        return None if values is None else {_type(json.loads(value)) for value in values}
    names = given if isinstance(given, list) else [given]
    return {"integer" if name == "number" else str(name) for name in names}


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", list: "array", dict: "object", int: "integer", float: "integer"}
    return names.get(type(value), "null")


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    whole = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
    return {json.dumps(value, sort_keys=True) for value in whole}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    given = schema.get("properties")
    return given if isinstance(given, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("required")
    return {name for name in given if isinstance(name, str)} if isinstance(given, list) else set()


def _forbids(schema: Mapping[str, Any], name: str) -> bool:
    if name in _properties(schema):
        return _properties(schema)[name] is False
    return schema.get("additionalProperties") is False and "patternProperties" not in schema
