"""Schemas as grammars: what is enforced, what is refused, and what a relaxed schema keeps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from atom import StructuredOutput
from atom.structured_output.schema.json_schema import check_schema, relax_schema
from atom.structured_output.schema_grammar import schema_format
from atom.structured_output.state import is_allowed
from atom.structured_output.xgrammar_backend import XGrammarBackend

S = {"type": "string"}
I = {"type": "integer"}  # noqa: E741
NAMES = {"type": "object", "additionalProperties": True}


def takes(backend: XGrammarBackend, schema: Any, text: str) -> bool:
    matcher = backend.compile(StructuredOutput.json_schema(schema)).create_matcher()
    if not matcher.accept_text(text.encode()):
        return False
    mask = np.zeros((1, -(-len(backend.vocabulary.tokens) // 32)), dtype=np.int32)
    matcher.fill(mask, 0)
    return is_allowed(mask, 0, backend.vocabulary.stop_token_ids[0])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "enum": ["a", 5]}, ['"a"'], ["5"]),
        ({"enum": [1, True], "type": "boolean"}, ["true"], ["1"]),
        ({"enum": ["a", "b"], "const": "b"}, ['"b"'], ['"a"']),
        ({"type": "integer", "minimum": 0.5}, ["1", "20"], ["0", "-1"]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1"], ["0"]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": False}, ["0"], ["-1"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", "99"], ["-1"]),
        ({"type": "number", "multipleOf": 5}, ["10", "0", "-5"], ["11", "2.5"]),
        ({"type": "integer", "multipleOf": 1.5}, ["3"], ["1"]),
        ({"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 10}, ["5", "10"], ["0"]),
        ({"minimum": 3, "maximum": 9}, ["3"], ["2"]),
        ({"type": ["integer", "null"], "minimum": 3}, ["3", "null"], ["2", '""']),
        ({"type": "string", "maxLength": 200}, ['"ab"'], ['"\x01"']),
        ({"type": "string", "minLength": 1, "maxLength": 1}, ['"a"'], ['"\x01"', '""']),
        ({"type": "string", "pattern": "^n_"}, ['"n_abc"', '"n_"'], ['"n"', '"an_"']),
        (
            {"properties": {"a": I}, **NAMES},
            ['{"a": 1, "b": ""}'],
            ['{"\\u0061": ""}', '{"a": ""}'],
        ),
        ({"properties": {"ab": I}, **NAMES}, ['{"x\\n": ""}'], ['{"a\\u0062": ""}']),
        (
            {"type": "object", "patternProperties": {"^a": I}},
            ['{"ab": 1}'],
            ['{"ab": ""}', '{"b": 1}'],
        ),
        ({"propertyNames": {"pattern": "^a$"}}, ['{"a": []}'], ['{"b": []}']),
        ({"required": ["a"], "properties": {"b": S}}, ['{"b": "", "a": 1}'], ['{"b": ""}', "{}"]),
        ({"required": ["a"], "additionalProperties": I}, ['{"a": 1}'], ['{"a": ""}', "{}"]),
        ({"type": "object", "additionalProperties": I, "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"properties": {"a": False, "b": S}}, ['{"b": ""}'], ['{"a": 1}']),
        (
            {"items": [I, S], "additionalItems": False},
            ['[1, ""]', "[1]"],
            ['["", 1]', '[1, "", 2]'],
        ),
        ({"prefixItems": [I, S], "maxItems": 1}, ["[1]", "[]"], ['[1, ""]']),
        ({"type": "array", "minItems": 2}, ['[1, ""]'], ["[1]"]),
        ({"oneOf": [I, S]}, ["1", '"a"'], ["null"]),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": I}}, ["1"], ['""']),
        ({"$ref": "#/$defs/a~01%20%C3%A4", "$defs": {"a~1 ä": I, "a/ ä": S}}, ["1"], ['""']),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a%20b": I}}, ["1"], ['""']),
        ({"$ref": "#/%24defs/a/anyOf/1", "$defs": {"a": {"anyOf": [S, I]}}}, ["1"], ['""']),
        ({"properties": {"a": {"$ref": "#"}}}, ['{"a": {"a": {}}}'], ['{"a": 1}']),
        ({"title": "t", "x-any": 5, "type": "integer", "nullable": True}, ["1"], ["null"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_enforced(
    backend: XGrammarBackend, schema: Any, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not takes(backend, schema, text)] == []
    assert [text for text in bad if takes(backend, schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "kept", "dropped"),
    [
        (
            {"type": "integer", "minimum": 1, "not": {}},
            {"type": "integer", "minimum": 1},
            ["'not'"],
        ),
        (
            {"type": "array", "items": I, "uniqueItems": True},
            {"type": "array", "items": I},
            ["'uniq"],
        ),
        (
            {"type": "string", "pattern": "(?=a)", "minLength": 2},
            {**S, "minLength": 2},
            ["lookahead"],
        ),
        ({"type": "any"}, True, ["'any'"]),
        (
            {"properties": {"a": {"type": "any"}, "b": I}},
            {"a": True, "b": I},
            ["properties/a: 'type"],
        ),
        ({"properties": {"a": I}, "anyOf": [{"required": ["a"]}]}, {"a": I}, ["beside 'anyOf'"]),
        ({"properties": {"a": {"$ref": "x.json"}}}, {"a": True}, ["'x.json'"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_a_relaxed_schema_keeps(schema: Any, kept: Any, dropped: list[str]) -> None:
    """The keyword that cannot be enforced goes alone, and the rest is a schema that can be."""
    relaxed, said = relax_schema(schema)
    check_schema(relaxed)
    assert (relaxed["properties"] if "properties" in schema else relaxed) == kept
    assert len(said) == len(dropped)
    assert all(part in text for part, text in zip(dropped, said, strict=True))


def test_objects_open_where_what_described_them_goes() -> None:
    relaxed, _ = relax_schema({"properties": {"a": I}, "allOf": [{"properties": {"b": S}}, {}]})
    assert relaxed["additionalProperties"] is True


def test_what_only_the_compiler_refuses_is_any_object_for_lenient_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def refuse_first(text: str) -> dict[str, Any]:
        calls.append(text)
        if len(calls) == 1:
            raise RuntimeError("no")
        return {"type": "any"}

    monkeypatch.setattr("atom.structured_output.schema_grammar._schema_format", refuse_first)
    format = {"type": "json_schema", "json_schema": {"type": "object"}, "lenient": "f"}
    assert schema_format(format) == {"type": "any"}
    assert "additionalProperties" in calls[1]
    calls.clear()
    with pytest.raises(RuntimeError):
        schema_format({name: value for name, value in format.items() if name != "lenient"})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, S]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {
            "properties": {"x": {"$ref": "#/$defs/a"}},
            "$defs": {
                "a": {"oneOf": [{"$ref": "#/$defs/b"}]},
                "b": {"allOf": [{"$ref": "#/$defs/a"}]},
            },
        },
    ],
)
def test_references_that_say_nothing_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"'\$ref' to '#.*' leads back to itself alone"):
        check_schema(schema)


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (
            "date",
            "2023-02-28 2024-02-29 2000-02-29 0004-02-29 0001-01-01 1999-12-31 2023-04-30",
            "2023-02-29 1900-02-29 0000-02-29 0000-01-01 2023-04-31 2023-00-01 2023-1-1 2023-13-01",
        ),
        ("time", "00:00:00Z 23:59:59.25+02:00", "24:00:00Z 10:00:60Z 10:00:00 10:00Z 1:00:00Z"),
        ("date-time", "2024-02-29T10:00:00-08:00", "2023-02-29T10:00:00Z 2023-02-28"),
    ],
)
def test_days_and_times_exist(backend: XGrammarBackend, format: str, good: str, bad: str) -> None:
    schema = {"type": "string", "format": format}
    assert [text for text in good.split() if not takes(backend, schema, json.dumps(text))] == []
    assert [text for text in bad.split() if takes(backend, schema, json.dumps(text))] == []
