"""Tools in TypeScript, as Kimi's tokenizers declare them."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.template import ChatTemplate
from atom.entrypoints.parsing.typescript_tools import declare_tools

# A template that writes tools as Kimi K2.5's does.
TEMPLATE = (
    "{%- if tools -%}{%- if tools_ts_str -%}"
    "<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str }}<|im_end|>"
    "{%- else -%}"
    "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>"
    "{%- endif -%}{%- endif -%}"
    "{%- for m in messages -%}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>"
    "{%- endfor -%}"
)


def _tool(parameters: Any = None, name: str = "f", description: Any = None) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    given = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _namespace(body: str) -> str:
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


STRING = {"type": "string"}
NODE = _object({"value": STRING, "next": {"$ref": "#/$defs/Node"}}, "value", description="A\nnode.")
# Schemas of parameters, and what stands after `type f = (_: `.
TYPES: dict[str, tuple[Any, str]] = {
    "no parameters": (None, "{}"),
    "an empty schema": ({}, "{}"),
    "no properties": ({"type": "object"}, "{}"),
    "required first, sorted": (
        _object({"b": STRING, "z": STRING, "a": STRING, "y": STRING}, "z", "y"),
        "{\n  y: string,\n  z: string,\n  a?: string,\n  b?: string\n}",
    ),
    "scalars": (
        _object({"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}}),
        "{\n  a?: number,\n  b?: boolean,\n  c?: null\n}",
    ),
    "a type that is none": (_object({"x": {"type": "uuid"}}, "x"), "{\n  x: uuid\n}"),
    "descriptions": (
        _object({"a": {"type": "string", "description": "One.\n\nTwo."}, "b": STRING}, "a", "b"),
        "{\n  // One.\n\n  // Two.\n  a: string,\n  b: string\n}",
    ),
    "bounds and defaults": (
        _object(
            {
                "a": {"type": "string", "pattern": "^a$", "maxLength": 9, "default": "é"},
                "b": {"type": "integer", "minimum": 1, "maximum": 2.5, "default": 2},
                "c": {"type": "boolean", "description": "C.", "default": False},
                "d": {"type": "array", "items": STRING, "minItems": 1, "default": ["x", None]},
                "e": {"type": "string", "format": "date", "default": None},
            }
        ),
        '{\n  // maxLength: 9, pattern: ^a$\n  // Default: "é"\n  a?: string,\n'
        "  // maximum: 2.5, minimum: 1\n  // Default: 2\n  b?: number,\n"
        "  // C.\n  // Default: False\n  c?: boolean,\n"
        '  // minItems: 1\n  // Default: ["x", null]\n  d?: Array<string>,\n  e?: string\n}',
    ),
    "enums": (
        _object(
            {
                "a": {"type": "string", "enum": ["x", 'say "y"']},
                "b": {"enum": [1, True, None]},
                "c": {"type": ["string", "null"], "enum": ["x", None], "description": "C."},
            }
        ),
        '{\n  a?: "x" | "say "y"",\n  b?: 1 | True | None,\n  // C.\n  c?: "x" | None\n}',
    ),
    "nested objects": (
        _object({"a": _object({"c": STRING, "b": {**STRING, "description": "B."}}, "c")}, "a"),
        "{\n  a: {\n    c: string,\n    // B.\n    b?: string\n  }\n}",
    ),
    "arrays": (
        _object(
            {
                "a": {"type": "array"},
                "b": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "c": {"type": "array", "items": {"type": "string", "description": "An item."}},
                "d": {"type": "array", "items": _object({"x": STRING}, "x")},
            }
        ),
        "{\n  a?: Array<any>,\n  b?: Array<Array<number>>,\n"
        "  c?: Array<\n    // An item.\n    string\n  >,\n"
        "  d?: Array<{\n    x: string\n  }>\n}",
    ),
    "unions": (
        _object(
            {
                "a": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "A."},
                "b": {"type": ["string", "object", "array"]},
                "c": {"anyOf": [_object({"x": STRING}), {"enum": ["k"]}]},
            }
        ),
        "{\n  // A.\n  a?: number | null,\n  b?: string | {} | Array<any>,\n"
        '  c?: {\n    x?: string\n  } | "k"\n}',
    ),
    "anything": (
        _object({"a": {}, "b": True, "c": False}),
        "{\n  a?: any,\n  b?: any,\n  c?: null\n}",
    ),
    "further properties": (
        _object(
            {"a": STRING, "b": _object({}, additionalProperties=False)}, additionalProperties=True
        ),
        "{\n  a?: string,\n  b?: {\n    [k: string]: never\n  },\n  [k: string]: any\n}",
    ),
    "further properties of a type": (
        _object({}, additionalProperties=_object({"x": STRING})),
        "{\n  [k: string]: {\n    x?: string\n  }\n}",
    ),
    "names": (
        _object({"城市": STRING, "x-y": STRING}, "城市"),
        "{\n  城市: string,\n  x-y?: string\n}",
    ),
}


@pytest.mark.parametrize("case", TYPES)
def test_types(case: str) -> None:
    schema, written = TYPES[case]
    assert declare_tools([_tool(schema)]) == _namespace(f"type f = (_: {written}) => any;")


def test_functions_follow_one_another() -> None:
    tools = [_tool(name="查询", description="Looks up.\nAll."), _tool(_object({"a": STRING}))]
    body = (
        "// Looks up.\n// All.\ntype 查询 = (_: {}) => any;\n"
        "type f = (_: {\n  a?: string\n}) => any;"
    )
    assert declare_tools(tools) == _namespace(body)


def test_references_are_interfaces() -> None:
    definitions = {"Node": NODE, "Color": {"enum": ["red"]}}
    node = {"$ref": "#/$defs/Node", "description": "The first."}
    properties = {"node": node, "c": {"$ref": "#/$defs/Color"}}
    schema = _object(properties, "node", **{"$defs": definitions})
    body = (
        'interface Color "red"\n// A\n// node.\n'
        "interface Node {\n  value: string,\n  next?: Node\n}\n"
        "// F.\ntype f = (_: {\n  // The first.\n  node: Node,\n  c?: Color\n}) => any;"
    )
    assert declare_tools([_tool(schema, description="F.")]) == _namespace(body)


def test_a_schema_may_refer_to_itself() -> None:
    schema = _object(
        {"value": STRING, "others": {"type": "array", "items": {"$ref": "#"}}}, "value"
    )
    body = (
        "interface parameters {\n  others?: Array<parameters>,\n  value: string\n}\n"
        "type f = (_: parameters) => any;"
    )
    assert declare_tools([_tool(schema)]) == _namespace(body)


REFUSED = [
    {"oneOf": [STRING]},
    {"allOf": [STRING]},
    {"const": 1},
    {"description": "of no type"},
    {"$ref": "#/definitions/X"},
    {"$ref": "#/$defs/Missing"},
    {"type": ["string", "file"]},
    {"type": "string", "enum": [1]},
    {"type": ["string", "integer"], "enum": [1]},
    {"type": "array", "items": [STRING]},
]


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_what_the_rule_has_no_words_for(
    schema: Any, byte_level_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """All tools of the request are told as JSON then, with sorted keys, and the log says why."""
    tools = [_tool(_object({"a": schema})), _tool(name="g")]
    with pytest.raises(ValueError, match=r"TypeScript|\$ref|enum|schema"):
        declare_tools(tools)
    with caplog.at_level(logging.INFO):
        prompt = _render(byte_level_tokenizer, tools)
    told = json.dumps(tools, sort_keys=True, separators=(",", ":"))
    assert f"tool_declare<|im_middle|>{told}<|im_end|>" in prompt
    assert "the tools are told as JSON: " in caplog.text


def _render(tokenizer: Any, tools: list[dict[str, Any]], **variables: Any) -> str:
    messages = [{"role": "user", "content": "hi"}]
    return ChatTemplate(tokenizer, TEMPLATE).render(messages, tools, variables)


def test_templates_are_given_typescript(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    tools = [_tool(_object({"b": STRING, "a": STRING}), description="Does it.")]
    prompt = _render(byte_level_tokenizer, tools)
    assert prompt == (
        f"<|im_system|>tool_declare<|im_middle|>{declare_tools(tools)}<|im_end|>"
        "<|im_user|>user<|im_middle|>hi<|im_end|>"
    )
    prompt = _render(byte_level_tokenizer, tools, tools_ts_str="the client's")
    assert prompt.startswith("<|im_system|>tool_declare<|im_middle|>the client's<|im_end|>")
    assert "tool_declare" not in _render(byte_level_tokenizer, [])
