"""Refuses JSON schema keywords that a grammar would ignore.

The lists are those of xgrammar 0.2, found by testing each keyword. Where a grammar is narrower than
its schema (declared order of properties, patterns that match the whole string), its documents are
still valid. `oneOf` is enforced as `anyOf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# Deeper schemas take more than a second to compile.
MAX_DEPTH = 64

_IGNORED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
)
# Keywords that are no constraints and may appear beside any other.
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$comment",
        "$defs",
        "definitions",
        "$schema",
        "$id",
    }
)
# If one of these is present, xgrammar ignores all other keywords.
_EXCLUSIVE = ("$ref", "anyOf", "oneOf", "allOf")
_NEEDS_TYPE = {
    "multipleOf": ("number", "integer"),
    "minimum": ("number", "integer"),
    "maximum": ("number", "integer"),
    "exclusiveMinimum": ("number", "integer"),
    "exclusiveMaximum": ("number", "integer"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
    "propertyNames": ("object",),
}
# Characters that mean themselves, and what xgrammar would ignore.
_CHARACTERS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_LOOKAHEAD = re.compile(r"\(\?[=!]")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames")


def check_schema(schema: Any) -> None:
    """Refuse an invalid schema, or one that a grammar cannot fully enforce.

    Raises:
        ValueError: with the location and the reason.
    """
    pending: list[tuple[Any, str, int]] = [(schema, "#", 0)]
    # References may repeat parts and form cycles.
    seen: set[int] = set()
    while pending:
        part, where, depth = pending.pop()
        if isinstance(part, bool) or id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, dict):
            raise ValueError(f"json_schema: {where} must be an object or a boolean, got {part!r}")
        if depth > MAX_DEPTH:
            raise ValueError(f"json_schema: it is nested deeper than {MAX_DEPTH} levels")
        reason = _reason(part, schema)
        if reason is not None:
            raise ValueError(f"json_schema: {where}: {reason}")
        pending += [(child, f"{where}/{name}", depth + 1) for name, child in _children(part)]
        if "$ref" in part:
            pending.append((_resolve(part["$ref"], schema), part["$ref"], depth + 1))


def is_enforceable(schema: Any) -> bool:
    """Whether `check_schema` accepts it."""
    try:
        check_schema(schema)
    except ValueError:
        return False
    return True


def _children(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MAPS_OF_SCHEMAS:
        value = part.get(name)
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", child) for key, child in value.items())
    for name in _LISTS_OF_SCHEMAS:
        value = part.get(name)
        if isinstance(value, list):
            yield from ((f"{name}/{i}", child) for i, child in enumerate(value))
    for name in _SCHEMAS:
        if name in part:
            yield name, part[name]


def _reason(part: dict[str, Any], root: Any) -> str | None:
    """Why this schema cannot be enforced, apart from its subschemas."""
    ignored = next((name for name in _IGNORED if name in part), None)
    if ignored is not None:
        return f"{ignored!r} is not supported"
    if part.get("uniqueItems"):
        return "'uniqueItems' is not supported"
    return (
        _wrong_combination(part)
        or _wrong_pattern(part)
        or _wrong_object(part)
        or _wrong_reference(part, root)
    )


def _wrong_combination(part: dict[str, Any]) -> str | None:
    exclusive = next((name for name in _EXCLUSIVE if name in part), None)
    beside = sorted(part.keys() - _ANNOTATIONS - {exclusive})
    if exclusive is not None and beside:
        return f"{beside} beside {exclusive!r} is not supported; write it into the branches"
    empty = next((name for name in (*_EXCLUSIVE, "type") if part.get(name) == []), None)
    if empty is not None:
        return f"{empty!r} must not be empty"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        return "'allOf' of several schemas is not supported; merge them"
    if "pattern" in part and ("minLength" in part or "maxLength" in part):
        return "'pattern' with 'minLength' or 'maxLength' is not supported; use the pattern alone"
    listed = next((name for name in ("enum", "const") if name in part), None)
    constraint = next((name for name in _NEEDS_TYPE if name in part), None)
    if listed is not None and constraint is not None:
        return f"{constraint!r} beside {listed!r} is not supported; list only what satisfies it"
    if "type" in part or listed is not None:
        return None
    untyped = next((name for name in _NEEDS_TYPE if name in part), None)
    if untyped is not None:
        return f"{untyped!r} needs a 'type' ({' or '.join(_NEEDS_TYPE[untyped])}) beside it"
    return None


def _wrong_pattern(part: dict[str, Any]) -> str | None:
    properties = part.get("patternProperties")
    patterns = [part.get("pattern"), *(properties if isinstance(properties, dict) else ())]
    for pattern in patterns:
        if isinstance(pattern, str) and _LOOKAHEAD.search(_CHARACTERS.sub("", pattern)):
            return f"lookahead in the pattern {pattern!r} is not supported"
    return None


def _wrong_object(part: dict[str, Any]) -> str | None:
    properties = part.get("properties", {})
    if not isinstance(properties, dict):
        return f"'properties' must be an object, got {properties!r}"
    required = part.get("required", [])
    if not isinstance(required, list):
        return f"'required' must be a list of names, got {required!r}"
    unknown = [name for name in required if not isinstance(name, str) or name not in properties]
    if unknown:
        return f"'required' names {unknown}, which 'properties' does not describe"
    return None


def _wrong_reference(part: dict[str, Any], root: Any) -> str | None:
    reference = part.get("$ref")
    if reference is None or reference == "#":
        return None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return f"'$ref' must point into the schema ('#/...'), got {reference!r}"
    if _resolve(reference, root) is None:
        return f"'$ref' points to {reference!r}, which is not there"
    return None


def _resolve(reference: str, root: Any) -> Any:
    """The part of the schema that a reference names; None if there is none."""
    target = root
    for name in reference[2:].split("/") if reference != "#" else ():
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or name not in target:
            return None
        target = target[name]
    return target
