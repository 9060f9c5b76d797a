"""Tool calls and reasoning in the formats of single families, and answers that repeat a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parser_texts import SPELLINGS, Call, create_parser, cuttings, read, stream

from atom.entrypoints.parsing.deltas import ParsedMessage
from atom.entrypoints.parsing.output_parser import ChatOutputParser

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "thing": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "choice": {"enum": ["a", 5]},
    "spelled": {"enum": ["5", 6, True, None]},
    "const": {"const": 7},
    "ref": {"$ref": "#/$defs/x"},
    "point": {"$ref": "#/$defs/Point"},
    "size": {"$ref": "#/$defs/Size", "description": "How large."},
    "label": {"$ref": "#/$defs/Label"},
    "loop": {"$ref": "#/$defs/Loop"},
    "whole": {"$ref": "#"},
    "escaped": {"$ref": "#/$defs/a~1b%20c"},
    "union": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"oneOf": [{"$ref": "#/$defs/Point"}, {"type": "string"}]},
    "both": {"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]},
    "all": {"allOf": [{"$ref": "#/$defs/Size"}]},
    "limited": {"anyOf": [{"enum": [1, 2]}, {"type": "string"}]},
    "types": {"type": ["integer", "string", "null"]},
    "list or text": {"type": ["array", "string"]},
    "nullable": {"type": "integer", "nullable": True},
    "shape": {"properties": {"a": {}}},
    "rows": {"items": {"type": "string"}},
    "bound": {"minimum": 0},
    "anything": {"description": "Any JSON."},
    "true": True,
    "python": {"type": "int"},
}
DEFINITIONS: dict[str, Any] = {
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Size": {"type": "integer"},
    "Label": {"type": "string", "enum": ["1", "2"]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
    "a/b c": {"type": "number"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": DEFINITIONS}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]


def _all(parser: str, text: str, reason: str = "stop") -> ParsedMessage:
    """The answer's meaning, however it is cut."""
    whole = ChatOutputParser(parser, None, TOOLS, False).parse_complete(text, reason)
    for chunks in cuttings(text):
        message = read(ChatOutputParser(parser, None, TOOLS, False), chunks, reason)
        assert message == whole
    return whole


def _calls(message: ParsedMessage) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


VALUES = [
    ("text", "5", '"5"'),
    ("text", 'say "hi"\n\\', '"say \\"hi\\"\\n\\\\"'),
    ("other", "5", '"5"'),
    ("count", "5", "5"),
    ("count", " 5 ", "5"),
    ("count", "five", '"five"'),
    ("ratio", "0.5", "0.5"),
    ("ratio", "2", "2"),
    ("flag", "true", "true"),
    ("flag", "True", "true"),
    ("items", '["a", 1]', '["a", 1]'),
    ("items", "['a', True]", '["a", true]'),
    ("thing", '{"a":  {}}', '{"a":  {}}'),
    ("thing", "{'a': None}", '{"a": null}'),
    ("maybe", "null", "null"),
    ("maybe", "nothing", '"nothing"'),
    ("maybe", "5", '"5"'),
    ("choice", "5", "5"),
    ("choice", "a", '"a"'),
    ("ref", '{"a": 1}', '{"a": 1}'),
    ("ref", "words", '"words"'),
    ("count", "5.0", "5"),
    ("count", "5.5", '"5.5"'),
    ("count", "null", '"null"'),
    ("ratio", "5.0", "5.0"),
    ("ratio", "NaN", '"NaN"'),
    ("ratio", "1e999", "1e999"),
    ("ratio", "-1.5E400", "-1.5E400"),
    ("items", "[1e999]", "[1e999]"),
    ("count", "1e999", '"1e999"'),
    ("flag", "1", '"1"'),
    ("items", "[NaN]", '"[NaN]"'),
    ("items", "[b'x']", "\"[b'x']\""),
    ("items", "['\\ud83d\\ude00', '\\ud83d']", '["😀", "\ufffd"]'),
    ("thing", "{'a': {1, 2}}", "\"{'a': {1, 2}}\""),
    ("maybe", '"quoted"', '"\\"quoted\\""'),
    ("choice", '"a"', '"a"'),
    ("choice", "6", "6"),
    ("spelled", "5", '"5"'),
    ("spelled", "6", "6"),
    ("spelled", "True", "true"),
    ("spelled", "None", "null"),
    ("const", "7", "7"),
    ("point", '{"x": 1}', '{"x": 1}'),
    ("size", "3", "3"),
    ("label", "1", '"1"'),
    ("loop", "true", "true"),
    ("whole", '{"text": "5"}', '{"text": "5"}'),
    ("escaped", "1.5", "1.5"),
    ("union", "5", "5"),
    ("union", "null", "null"),
    ("union", "None", "null"),
    ("union", "five", '"five"'),
    ("either", '{"x": 1}', '{"x": 1}'),
    ("either", "[1]", '"[1]"'),
    ("either", "5", '"5"'),
    ("both", "5", "5"),
    ("both", "null", '"null"'),
    ("all", "5", "5"),
    ("limited", "2", "2"),
    ("limited", "3", '"3"'),
    ("types", "5", "5"),
    ("types", "null", "null"),
    ("types", "5.5", '"5.5"'),
    ("list or text", "[1]", "[1]"),
    ("list or text", "1", '"1"'),
    ("nullable", "null", "null"),
    ("shape", '{"a": 1}', '{"a": 1}'),
    ("shape", "5", '"5"'),
    ("rows", '["a"]', '["a"]'),
    ("bound", "5", "5"),
    ("anything", '{"a": 1}', '{"a": 1}'),
    ("anything", "5", "5"),
    ("anything", "words", '"words"'),
    ("true", "false", "false"),
    ("python", "5", "5"),
]
# Schemas of all parameters, and what 5 is as `key`.
ROOTS: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"key": {"type": "integer"}}}, "5"),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"key": {"type": "integer"}}}}}, "5"),
    ({"allOf": [{"properties": {"key": {"type": "integer"}}}, {"required": ["key"]}]}, "5"),
    ({"anyOf": [{"properties": {"key": {"type": "null"}}}, {"properties": {}}]}, '"5"'),
    ({"oneOf": [{"properties": {"key": {"type": kind}}} for kind in ("null", "integer")]}, "5"),
    ({"additionalProperties": {"type": "integer"}}, "5"),
    ({"additionalProperties": True}, '"5"'),
    ({"allOf": [{"$ref": "#"}]}, '"5"'),
    ({"properties": "wrong", "allOf": "wrong", "$ref": 5}, '"5"'),
    ({}, '"5"'),
]


@pytest.mark.parametrize(("schema", "argument"), ROOTS)
def test_parameters_are_found_in_every_shape_of_schema(
    schema: dict[str, Any], argument: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = "<tool_call>\n<function=f>\n<parameter=key>\n5\n</parameter>\n</function>\n</tool_call>"
    message = ChatOutputParser("qwen3_coder", None, tools, False).parse_complete(text, "stop")
    assert _calls(message) == [("f", f'{{"key": {argument}}}')]


@pytest.mark.parametrize(("key", "value", "argument"), VALUES)
def test_values_have_the_types_of_the_schema(key: str, value: str, argument: str) -> None:
    arguments = f'{{"{key}": {argument}}}'
    qwen = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
    assert _calls(_all("qwen3_coder", qwen + "</tool_call>")) == [("f", arguments)]
    glm = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert _calls(_all("glm45", glm)) == [("f", arguments)]


TAGS = "<tool_call> </tool_call> <function=x> </function> <parameter=y> </parameter> x"
QWEN = [
    (f"<tool_call>\n<function=f>\n<parameter=text>\n{TAGS}\n</parameter>\n</function>\n</tool_call>",
     None, [("f", json.dumps({"text": TAGS}))]),
    ("<tool_call>\n<function=g>\n</function>\n</tool_call>", None, [("g", "{}")]),
    ("hi <tool_call><function=g></function></tool_call>\n", "hi ", [("g", "{}")]),
    ("<function=g>\n</function>\n</tool_call>", None, [("g", "{}")]),
    ("<tool_call>\n<function=f>\n<parameter=text>\na\n</function>\n</tool_call>",
     None, [("f", '{"text": "a"}')]),
    ("<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n<parameter=text>\n\nb\n\n"
     "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
     None, [("f", '{"count": 1, "text": "\\nb\\n"}'), ("g", "{}")]),
    ("<tool_call>\nwords\n</tool_call>", "\nwords\n", []),
]  # fmt: skip
GLM = [
    ("<tool_call>f<arg_key>count</arg_key><arg_value>1</arg_value></tool_call>",
     None, [("f", '{"count": 1}')]),
    ("a<tool_call>g\n</tool_call>b", "ab", [("g", "{}")]),
    ("<tool_call>g</tool_call>\n<tool_call>g</tool_call>", None, [("g", "{}")] * 2),
    ("<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a </arg_value> b <tool_call></arg_value>\n"
     "</tool_call>", None, [("f", '{"text": "a </arg_value> b <tool_call>"}')]),
]  # fmt: skip
MISTRAL = [
    ('[TOOL_CALLS][{"name": "f", "arguments": {"text": "[TOOL_CALLS]"}}]',
     None, [("f", '{"text": "[TOOL_CALLS]"}')]),
    ('a[TOOL_CALLS] [{"name": "g", "arguments": {}}, {"arguments": {}, "name": "f"}] b',
     "a b", [("g", "{}"), ("f", "{}")]),
    ('[TOOL_CALLS]f[ARGS]{"text": "[ARGS]"}[TOOL_CALLS]g[ARGS]{}',
     None, [("f", '{"text": "[ARGS]"}'), ("g", "{}")]),
    ("[TOOL_CALLS]g{}", None, [("g", "{}")]),
    ("[TOOL_CALLS]g[CALL_ID]abcdef123[ARGS]{}", None, [("g", "{}")]),
    ("[TOOL_CALLS] so, then", "so, then", []),
]  # fmt: skip
GPT_OSS = [
    ("<|channel|>final<|message|>Hello<|return|>", "Hello", []),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
     '{"text": "<|end|> x"}<|call|>', None, [("f", '{"text": "<|end|> x"}')]),
    (" to=functions.g<|channel|>commentary json<|message|>{}<|call|>", None, [("g", "{}")]),
    ("<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=functions.g"
     "<|channel|>commentary <|constrain|>json<|message|>{}", "Let me look.", [("g", "{}")]),
    ("Hello", "Hello", []),
]  # fmt: skip
PYTHONIC = [
    ("[f(text='it\\'s ) ]', count=-1), g()]", None,
     [("f", '{"text": "it\'s ) ]", "count": -1}'), ("g", "{}")]),
    ('<|python_start|>[g()]<|python_end|>', None, [("g", "{}")]),
    ('<function_calls>\ng()\nf(flag=true, items=[1, None])\n</function_calls>', None,
     [("g", "{}"), ("f", '{"flag": true, "items": [1, null]}')]),
    ('[f(**{"text": "\\ud83d\\ude00", "thing": {"a": null}})]', None,
     [("f", '{"text": "😀", "thing": {"a": null}}')]),
    ("[g()] done", " done", [("g", "{}")]),
    ("[f(text=unknown)]", None, [("f", "(text=unknown)")]),
    ("[link](http://x)", "[link](http://x)", []),
    ("[1] is a note", "[1] is a note", []),
    ("[unheard_of(1)]", "[unheard_of(1)]", []),
    ("words [g()]", "words [g()]", []),
]  # fmt: skip
HERMES = [
    ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>',
     None, [("f", "{}"), ("g", "{}")]),
]  # fmt: skip
TEXTS = [
    (parser, *case)
    for parser, cases in {
        "qwen3_coder": QWEN,
        "glm45": GLM,
        "mistral": MISTRAL,
        "mistral_named": MISTRAL,
        "gpt_oss": GPT_OSS,
        "pythonic": PYTHONIC,
        "hermes": HERMES,
    }.items()
    for case in cases
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), TEXTS)
def test_texts(parser: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    message = _all(parser, text)
    assert (message.content, _calls(message)) == (content, calls)


def test_ids_for_mistral_are_as_its_template_wants_them() -> None:
    message = _all("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}]')
    assert len(message.tool_calls[0].id) == 9
    assert message.tool_calls[0].id.isalnum()
    message = _all("mistral", "[TOOL_CALLS]g[CALL_ID]abcdef123[ARGS]{}")
    assert message.tool_calls[0].id == "abcdef123"


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_markers_in_arguments_are_text(spelling: Any) -> None:
    """Every format reads a string that speaks of its own markers, but for what ends a call."""
    for marker in spelling.markers:
        arguments = json.dumps({"text": f"a {marker} b"}, ensure_ascii=False)
        text = spelling.spell([[Call("f", arguments)]])
        whole = create_parser(spelling.name).parse_complete(text, "stop")
        assert _calls(whole) == [("f", arguments)], marker
        assert whole.content is None
        for chunks in cuttings(text):
            assert read(create_parser(spelling.name), chunks) == whole


REASONING = [
    ("granite", "Here is my thought process: a\nHere is my response: b", " a\n", " b"),
    ("granite", "Here's my thought process:a Here's my response:b", "a ", "b"),
    ("granite", "So. Here is my response: b", None, "So. Here is my response: b"),
    ("granite", "Here is my thought", None, "Here is my thought"),
    ("granite_tags", "<think>a</think><response>b</response>", "a", "b"),
    ("gpt_oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final"
     "<|message|>b<|return|>", "a", "b"),
    ("gpt_oss", "<|channel|>analysis<|message|>a", "a", None),
    ("minimax_m2", "<think>a</think>b", "a", "b"),
    ("minimax_m3", "<mm:think>a</mm:think>b", "a", "b"),
    ("mistral", "[THINK]a[/THINK]b", "a", "b"),
    ("glm45", "<think>a</think>b", "a", "b"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), REASONING)
def test_reasoning(name: str, text: str, reasoning: str | None, content: str | None) -> None:
    for chunks in cuttings(text):
        message = read(ChatOutputParser(None, name, None, False), chunks)
        assert (message.reasoning_content, message.content) == (reasoning, content)


def test_step3_begins_within_reasoning() -> None:
    from atom.entrypoints.parsing.reasoning import REASONING_PARSERS

    assert REASONING_PARSERS["step3"].end_after("<user>hi<assistant>") == "</think>"
    assert REASONING_PARSERS["step3"].end_after("<assistant><think></think>") is None
    assert REASONING_PARSERS["qwen3"].end_after("<user>hi<assistant>") is None
    own_tags = REASONING_PARSERS["qwen3"].own_tags_after
    assert own_tags("<user>hi<assistant>") == ("<think>", "</think>")
    assert own_tags("<assistant><think>\n\n</think>\n\n") is None
    assert REASONING_PARSERS["step3"].own_tags_after("<user>hi<assistant>") is None


def test_harmony_thoughts_and_calls_together() -> None:
    text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"count": 1}<|call|>'
    )
    for chunks in cuttings(text):
        message = read(ChatOutputParser("gpt_oss", "gpt_oss", TOOLS, False), chunks)
        assert (message.reasoning_content, message.content) == ("why", None)
        assert _calls(message) == [("f", '{"count": 1}')]
        message = read(ChatOutputParser("gpt_oss", None, TOOLS, False), chunks)
        assert (message.reasoning_content, message.content) == (None, "why")


def test_a_harmony_message_may_lack_its_head() -> None:
    for chunks in cuttings("<|message|>hello<|end|>"):
        for parser in ("gpt_oss", None):
            message = read(ChatOutputParser(parser, "gpt_oss", TOOLS, False), chunks)
            assert (message.reasoning_content, message.content) == (None, "hello")


def test_a_key_without_a_value_makes_no_call() -> None:
    call = '{"name", "name": "f", "arguments": {"count": 1}}'
    for chunks in cuttings(f"<tool_call>{call}</tool_call>x"):
        message = read(ChatOutputParser("hermes", None, TOOLS, False), chunks)
        assert (message.content, message.tool_calls) == (f"{call}x", [])


def _repeating(text: str, reason: str = "stop") -> tuple[list[str], str | None]:
    """The arguments of the calls of f that remain, and the reason that the answer gives."""
    found: Any = None
    for chunks in cuttings(text):
        parser = ChatOutputParser("hermes", None, None, False, ends_at_repeat=True)
        message = ParsedMessage.of(stream(parser, chunks, reason))
        arguments = [call.function.arguments for call in message.tool_calls]
        assert found in (None, (arguments, parser.finish_reason))
        found = (arguments, parser.finish_reason)
    return found  # type: ignore[no-any-return]


def test_a_repeated_call_ends_the_answer() -> None:
    def call(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\n'

    one, two, longer = '{"a": 1}', '{"a": 2}', '{"a": 11}'
    assert _repeating(call(one)) == ([one], "tool_calls")
    assert _repeating(call(one) + call(two) + call(longer)) == ([one, two, longer], "tool_calls")
    assert _repeating(call(one) + call(one)) == ([one], "tool_calls")
    assert _repeating(call(one) + call(two) + call(one) + call(longer)) == (
        [one, two],
        "tool_calls",
    )
    assert _repeating(call(one) + call(one) + call(two) + "x", "length") == ([one], "tool_calls")
    assert _repeating(call(one) + call(two)[:-30], "length")[1] == "length"


def test_a_call_that_differs_streams_from_where_it_does() -> None:
    parser = ChatOutputParser("hermes", None, None, False, ends_at_repeat=True)
    first = '<tool_call>{"name": "f", "arguments": {"a": "xy"}}</tool_call>'
    parser.feed(first)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "x') == []
    said = parser.feed("z")
    assert "".join(p.function.arguments for d in said for p in d.tool_calls or ()) == '{"a": "xz'


def test_calls_may_repeat_where_none_is_forced() -> None:
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>' * 2
    assert _calls(_all("hermes", text)) == [("g", "{}")] * 2


K3_CALL = '<|open|>tools<|sep|><|open|>call tool="{}" index="1"<|sep|>{}<|close|>call<|sep|>'
K3: list[tuple[str, str | None, list[tuple[str, str]]]] = [
    (K3_CALL.format("f", '<|open|>json type="object"<|sep|>{"a":  [1]}<|close|>json<|sep|>'),
     None, [("f", '{"a":  [1]}')]),
    (K3_CALL.format("a&amp;&quot;b&quot;", ""), None, [('a&"b"', "{}")]),
    (K3_CALL.format("g", "") + "<|close|>message<|sep|><|end_of_msg|>", None, [("g", "{}")]),
    ("<|open|>response<|sep|>Hi.<|close|>response<|sep|>" + K3_CALL.format("g", "")
     + '<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
     "Hi.", [("g", "{}"), ("f", "{}")]),
    ("Hi.<|close|>response<|sep|><|close|>message<|sep|>", "Hi.", []),
    ("<|open|>tools<|sep|><|close|>tools<|sep|>", None, []),
    ("<|open|> is no tag", "<|open|> is no tag", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), K3)
def test_texts_of_kimi_k3(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    message = _all("kimi_k3", text)
    assert (message.content, _calls(message)) == (content, calls)


@pytest.mark.parametrize(
    ("key", "kind", "value", "argument"),
    [
        ("text", "string", "5", '"5"'),
        ("text", "number", "5", '"5"'),
        ("count", "number", "5", "5"),
        ("count", "string", "5", "5"),
        ("types", "string", "5", '"5"'),
        ("types", "number", "5", "5"),
        ("maybe", "string", "null", '"null"'),
        ("maybe", "null", "null", "null"),
        ("anything", "string", "[1]", '"[1]"'),
        ("anything", "array", "[1]", "[1]"),
        ("undeclared", "object", '{"a": 1}', '{"a": 1}'),
        ("undeclared", "string", "5", '"5"'),
        ("undeclared", "number", "five", '"five"'),
        ("undeclared", "odd", "5", '"5"'),
    ],
)
def test_the_type_that_a_tag_says_chooses_of_those_allowed(
    key: str, kind: str, value: str, argument: str
) -> None:
    tag = f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    assert _calls(_all("kimi_k3", K3_CALL.format("f", tag))) == [("f", f'{{"{key}": {argument}}}')]


def test_reasoning_of_kimi_k3() -> None:
    text = "a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"
    for chunks in cuttings(text + "<|close|>message<|sep|><|end_of_msg|>"):
        message = read(ChatOutputParser("kimi_k3", "kimi_k3", TOOLS, True), chunks)
        assert (message.reasoning_content, message.content) == ("a", "b")


def test_python_writes_numbers_beyond_floats() -> None:
    text = "[f(a=1e999, b=[-1.5E+400, {'x': 1_0.e999}], **{'true': .5e9999, true: 2})]"
    expected = '{"a": 1e999, "b": [-1.5E+400, {"x": 10e999}], "true": 0.5e9999, "True": 2}'
    assert _calls(_all("pythonic", text)) == [("f", expected)]
    huge = f"[f(a=1e{'9' * 40})]"
    assert _calls(_all("pythonic", huge)) == [("f", f'{{"a": 1e{"9" * 40}}}')]
    digits = f"[f(a={'9' * 400}.0)]"  # no exponent, and no float
    assert _calls(_all("pythonic", digits)) == [("f", f'{{"a": {"9" * 400}.0}}')]
