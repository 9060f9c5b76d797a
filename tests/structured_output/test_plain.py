"""What compiles without a trial: only what cannot take long."""

from __future__ import annotations

from typing import Any

import pytest

from atom import StructuredOutput
from atom.entrypoints.parsing.tool_grammar import tool_call_grammar
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.structured_output.plain import is_plain

TEXT = {"type": "string", "description": "{2}"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = dict(TEXT)
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": TEXT, "minLength": TEXT}, "required": ["a"]},
        {"type": "object", "additionalProperties": False, "title": "pattern"},
        {"enum": ["a", 1, None]},
        nested(10),
    ],
)
def test_plain_schemas(schema: dict[str, Any]) -> None:
    assert is_plain(StructuredOutput.json_schema(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 3},
        {"type": "string", "pattern": "a{1000}"},
        {"type": "array", "items": {"type": "string", "format": "date"}},
        {"type": "array", "maxItems": 9},
        {"anyOf": [TEXT, {"type": "null"}]},
        {"type": ["string", "null"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": TEXT}},
        {"type": "object", "properties": {str(i): TEXT for i in range(65)}},
        {"enum": list(range(257))},
        nested(17),
    ],
)
def test_others(schema: dict[str, Any]) -> None:
    assert not is_plain(StructuredOutput.json_schema(schema))
    if "$defs" in schema:  # they belong to a whole schema
        return
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": schema}}},
    }
    tag = tool_call_grammar("hermes", [tool], "required")
    assert tag is not None
    assert not is_plain(tag)


def test_what_users_write_in_other_ways() -> None:
    assert not is_plain(StructuredOutput.regex("a"))
    assert not is_plain(StructuredOutput.ebnf('root ::= "a"'))
    assert not is_plain(StructuredOutput.choice(["a"]))
    assert is_plain(StructuredOutput.json_object())


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "regex", "pattern": "[0-9]{1,6}[^{]"}, True),
        ({"type": "regex", "pattern": "(a{9}){9}"}, False),
        ({"type": "regex", "pattern": "a{10}"}, False),
        ({"type": "regex", "pattern": "a" * 65}, False),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, False),
        ({"type": "repeat", "min": 0, "max": 100, "content": {"type": "any_text"}}, True),
        ({"type": "repeat", "min": 0, "max": 1000, "content": {"type": "any_text"}}, False),
    ],
)
def test_parts_of_tags(part: dict[str, Any], expected: bool) -> None:
    tag = {"type": "sequence", "elements": [{"type": "const_string", "value": "("}, part]}
    assert is_plain(StructuredOutput.structural_tag(tag)) == expected
    twice = {"type": "repeat", "min": 0, "max": 100, "content": tag}
    is_repeat = part["type"] == "repeat"
    assert is_plain(StructuredOutput.structural_tag(twice)) == (expected and not is_repeat)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_usual_tools_in_every_format(name: str) -> None:
    parameters = {"type": "object", "properties": {"a": TEXT, "b": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}
        for i in range(5)
    ]
    for choice in ("auto", "required"):
        wanted = tool_call_grammar(name, tools, choice, strictness="schemas")
        assert wanted is not None
        assert is_plain(wanted), (name, choice)
