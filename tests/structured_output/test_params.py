"""Constraints as values: what is refused at construction, and the way over the wire."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atom import SamplingParams, StructuredOutput
from atom.messages import EngineRequest
from atom.model_engine.processes import wire
from atom.structured_output import params
from atom.structured_output.outputs_params import structural_tag
from atom.structured_output.params import MAX_CHARACTERS

S = {"type": "string"}


def tag_of(**format: Any) -> dict[str, str]:
    return {"kind": "structural_tag", "value": json.dumps(format)}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not JSON"),
        ([], "must be an object"),
        ({"type": "object", "properties": {"a": 5}}, "#/properties/a: a schema must be an object"),
        ({"not": S}, "'not' is not supported"),
        ({"anyOf": []}, "'anyOf' must not be empty"),
        ({"items": {"type": []}}, "#/items: 'type' must not be empty"),
        ({"type": "string", "pattern": "(?=a)b"}, "lookahead"),
        ({"type": "object", "patternProperties": {"a(?!b)": S}}, "lookahead"),
        ({"items": {"if": S}}, "#/items: 'if' is not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"anyOf": [{"type": "array", "contains": S}]}, "#/anyOf/0: 'contains'"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"allOf": [S, S]}, "merge them"),
        ({"type": "object", "anyOf": [S]}, r"\['type'\] beside 'anyOf'"),
        ({"$defs": {"a": S}, "$ref": "#/$defs/a", "maxLength": 3}, "beside '\\$ref'"),
        ({"type": "integer", "enum": [1, 5], "minimum": 3}, "'minimum' beside 'enum'"),
        ({"properties": {"x": {"$ref": "#/c"}}, "c": {"uniqueItems": True}}, "uniqueItems"),
        ({"$ref": "#/$defs/a"}, "which is not there"),
        ({"$defs": {"a": [S]}, "$ref": "#/$defs/a/²"}, "which is not there"),
        ({"$defs": {"a": [S]}, "$ref": "#/$defs/a/00"}, "which is not there"),
        ({"type": "string", "minLength": 10**9}, "'minLength' is 1000000000, at most 16777216"),
        ({"type": "array", "minItems": 10**9}, "'minItems' is 1000000000, at most 16777216"),
        ({"$ref": "https://example.com/schema"}, "must point into the schema"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' .* beside 'maxLength'"),
        ({"type": "text"}, "'type' must be one of null, .*, got 'text'"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "no integer has 'minimum' and 'maximum'"),
        ({"type": "number", "multipleOf": 0.01}, "'multipleOf'"),
        (
            {"type": "object", "propertyNames": {"pattern": "a", "type": "integer"}},
            "'propertyNames' must say a pattern or a length",
        ),
        ({"type": "integer", "multipleOf": 5, "minimum": 3}, "'multipleOf' beside 'minimum'"),
        (
            {"type": "integer", "multipleOf": 5, "minimum": -9999, "maximum": 9999},
            "'multipleOf' beside 'minimum'",
        ),
        ({"type": "string", "format": "email", "maxLength": 5}, "'format' .* beside 'maxLength'"),
        ({"patternProperties": {"^a": S}, "properties": {"a": S}}, "'patternProperties' beside"),
        ({"type": "object", "additionalProperties": S, "minProperties": 2}, "'minProperties'"),
        ({"type": "string", "enum": [5]}, "leave no value of the 'type'"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf' .* may hold together"),
        ({"enum": ["ab"], "pattern": "^a"}, "'pattern' beside 'enum'"),
        ({"properties": {"a": S}, "required": ["b"], "additionalProperties": False}, "'required'"),
        ({"type": "object", "properties": []}, "'properties' must be an object"),
        ({"enum": ["x" * MAX_CHARACTERS]}, f"at most {MAX_CHARACTERS}"),
    ],
    ids=str,
)
def test_schemas_that_cannot_be_enforced(schema: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^structured_output: .*{reason}"):
        StructuredOutput.json_schema(schema)


def test_deep_schemas() -> None:
    schema: dict[str, Any] = S
    for _ in range(65):
        schema = {"type": "object", "properties": {"a": schema}}
    StructuredOutput.json_schema(schema["properties"]["a"])
    with pytest.raises(ValueError, match="deeper than 64"):
        StructuredOutput.json_schema(schema)
    for text in ("[" * 60000, '{"items":' * 6000):
        with pytest.raises(ValueError, match="structured_output"):
            StructuredOutput.json_schema(text)


def test_schemas_of_models_pass() -> None:
    """What pydantic writes: references, optional fields, descriptions beside references."""
    node = {
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
        "type": "object",
        "title": "T",
        "properties": {
            "root": {"$ref": "#/$defs/Node", "description": "the first"},
            "tag": {"anyOf": [S, {"type": "null"}], "default": None, "title": "Tag"},
            "not": {"type": "integer", "minimum": 0},
        },
        "required": ["root"],
    }
    assert StructuredOutput.json_schema(node).kind == "json_schema"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "json_object", "value": "x"}, "takes no value"),
        ({"kind": "regex"}, "is empty"),
        ({"kind": "ebnf", "value": ""}, "is empty"),
        ({"kind": "choice", "value": "[]"}, "1 to 4096 strings, got 0"),
        ({"kind": "choice", "value": '["a", 1]'}, "list of non-empty strings"),
        ({"kind": "choice", "value": '["a", ""]'}, "list of non-empty strings"),
        ({"kind": "structural_tag", "value": "[]"}, "must be an object"),
        (tag_of(type=[]), r"type is a string, got \[\]"),
        (tag_of(type="sequence", elements=[{"type": 1}]), "type is a string, got 1"),
        (tag_of(type="token"), r"token of a structural_tag is of tokens, .* got \[None\]"),
        (
            tag_of(type="tag", begin={}, content={}, end=""),
            "begin of a structural_tag is of tokens",
        ),
        (tag_of(type="any_tokens", exclude_tokens=[[]]), "exclude_tokens of a structural_tag"),
        (tag_of(type="regex"), "a regex is a string, got None"),
        (tag_of(type="optional", content={"type": "regex", "pattern": 1}), "string, got 1"),
        (tag_of(type="token_triggered_tags", tags=[]), "needs trigger_tokens"),
        (tag_of(type="token_triggered_tags", trigger_tokens="<", tags=[]), "got '<'"),
        ({"kind": "regex", "value": "a", "starts_after": ""}, "starts_after"),
        ({"kind": "regex", "value": "a", "opens_with": "x"}, "opens_with"),
        ({"kind": "regex", "value": "\ud800"}, "not valid Unicode"),
    ],
)
def test_other_wrong_values(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^structured_output: .*{reason}"):
        StructuredOutput(**fields)


def test_schemas_within_tags_are_checked() -> None:
    document = {"type": "json_schema", "json_schema": {"properties": {"type": {"not": {}}}}}
    with pytest.raises(ValueError, match="#/properties/type: 'not'"):
        StructuredOutput.structural_tag({"type": "sequence", "elements": [document]})


def test_ignore_eos_contradicts() -> None:
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(structured_output=StructuredOutput.json_object(), ignore_eos=True)


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput.json_object(),
        StructuredOutput.json_schema({"type": "string", "enum": ["ä", '"']}),
        StructuredOutput(kind="regex", value=r"\d+", starts_after="</think>"),
        StructuredOutput.choice(["a", "日本"]),
        StructuredOutput.ebnf('root ::= "a"'),
        StructuredOutput.structural_tag({"type": "any_text"}),
    ],
    ids=lambda wanted: wanted.kind,
)
def test_wire_round_trip(wanted: StructuredOutput) -> None:
    sampling = SamplingParams(structured_output=wanted)
    request = EngineRequest(id="a", prompt_token_ids=[1], params=sampling, seed=1)
    message = wire.decode_to_engine(wire.encode(wire.AddRequests.of([request])))
    assert isinstance(message, wire.AddRequests)
    (crossed,) = message.requests()
    assert crossed == request
    assert hash(crossed.params.structured_output) == hash(wanted)


def test_what_was_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schemas of a hundred tools take 50 ms, and would with every turn of an agent."""
    checked: list[Any] = []
    monkeypatch.setattr(params, "check_schema", checked.append)
    wanted = StructuredOutput.json_schema({"title": "only here", **S})
    assert len(checked) == 1
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(wanted), type=StructuredOutput)
    assert again == wanted
    assert len(checked) == 1


def test_a_structural_tag_may_have_as_many_characters_as_others() -> None:
    def tag(size: int) -> dict[str, str]:
        return {"type": "const_string", "value": "x" * size}

    room = MAX_CHARACTERS - len(structural_tag(tag(0)).value)
    assert len(structural_tag(tag(room)).value) == MAX_CHARACTERS
    with pytest.raises(ValueError, match=f"at most {MAX_CHARACTERS} are supported"):
        structural_tag(tag(room + 1))
