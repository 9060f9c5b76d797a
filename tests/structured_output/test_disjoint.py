"""Which schemas certainly exclude one another, so that `oneOf` of them is `anyOf`."""

from __future__ import annotations

from typing import Any

import pytest

from atom.structured_output.schema.disjoint import are_disjoint

X = {"x": {"type": "integer"}}
HAS_X: dict[str, Any] = {"type": "object", "properties": X, "required": ["x"]}


def kind(name: str, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": [*required]}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (False, {}, True),
        (True, {"type": "string"}, False),
        ({}, {}, False),
        ({"type": "string"}, {"type": "integer"}, True),
        ({"type": "number"}, {"type": "integer"}, False),
        ({"type": ["string", "null"]}, {"type": ["integer", "null"]}, False),
        ({"type": "string"}, {"minLength": 1}, False),
        ({"const": 1}, {"const": 2}, True),
        ({"const": 1.0}, {"enum": [1, 2]}, False),
        ({"const": 1.5}, {"type": "integer"}, False),
        ({"const": "a"}, {"type": "integer"}, True),
        ({"const": True}, {"type": "integer"}, True),
        ({"const": None}, {"type": "null"}, False),
        ({"enum": [[1]]}, {"type": "object"}, True),
        (HAS_X, {"type": "object", "additionalProperties": False}, True),
        (HAS_X, {"type": "object", "properties": {"x": False}}, True),
        ({"type": "object", "properties": {"x": False}}, HAS_X, True),
        (HAS_X, {"type": "object", "properties": X, "additionalProperties": False}, False),
        (
            HAS_X,
            {"type": "object", "additionalProperties": False, "patternProperties": {"x": {}}},
            False,
        ),
        (HAS_X, {"additionalProperties": False}, False),
        (kind("a", "kind"), kind("b", "kind"), True),
        (kind("a", "kind"), kind("a", "kind"), False),
        (kind("a", "kind"), kind("b"), False),
    ],
)
def test_pairs(a: Any, b: Any, expected: bool) -> None:
    assert are_disjoint([a, b], lambda schema: schema) is expected


def test_all_pairs_count_and_references_are_followed() -> None:
    s, i, n = ({"type": name} for name in ("string", "integer", "null"))
    assert are_disjoint([s, i, n], lambda schema: schema)
    assert not are_disjoint([s, i, s], lambda schema: schema)
    known = {"s": s, "i": i}

    def target(schema: Any) -> Any:
        return known.get(schema.get("$ref"), schema)

    assert are_disjoint([{"$ref": "s"}, {"$ref": "i"}], target)
    assert not are_disjoint([{"$ref": "s"}, s], target)
