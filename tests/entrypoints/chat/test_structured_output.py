"""Constrained answers over HTTP, from an engine that speculates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess
from transformers import PreTrainedTokenizerFast

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "color": {"enum": ["red", "日本"]}},
    "required": ["ok", "color"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TAG: Any = {"type": "structural_tag", "format": {"type": "const_string", "value": "hi"}}
USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("first", "second")
]


@pytest.fixture(scope="module")
def server(
    tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "short.jinja"
    template.write_text(
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    flags = ["--tool-call-parser", "hermes", "--chat-template", str(template)]
    flags += ["--method", "suffix", "--num-speculative-tokens", "3"]
    process = ServerProcess(tiny_llama_dir, "--served-model-name", "tiny", *flags)
    try:
        yield process.wait_ready()
    finally:
        process.stop()


def is_valid(document: Any) -> bool:
    return (
        list(document) == ["ok", "color"]
        and isinstance(document["ok"], bool)
        and document["color"] in ("red", "日本")
    )


def test_response_formats_in_chats(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": USER, "max_tokens": 60}
    answer = client.chat.completions.create(**ask, response_format=FORMAT, n=8, seed=1)
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    done = [c.message.content or "" for c in answer.choices if c.finish_reason == "stop"]
    assert len(done) > 4
    assert all(is_valid(json.loads(text)) for text in done)
    stream = client.chat.completions.create(**ask, response_format=FORMAT, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
    answer = client.chat.completions.create(
        **ask, response_format={"type": "json_object"}, temperature=0, logprobs=True
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "(日本){2}"}, {"日本日本"}),
        ({"guided_grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
        ({"guided_json": {"enum": ["x"]}}, {'"x"'}),
        ({"guided_json": '{"const": 5}'}, {"5"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}},
            {"1"},
        ),
        ({"response_format": {"type": "json_object", "schema": {"const": 2}}}, {"2"}),
        ({"response_format": {"type": "json_schema", "schema": '{"const": 3}'}}, {"3"}),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a" | "b"'}}, {"a", "b"}),
        ({"response_format": {"type": "regex", "pattern": "(日本){2}"}}, {"日本日本"}),
        ({"response_format": TAG}, {"hi"}),
        ({"structural_tag": TAG, "grammar": ""}, {"hi"}),
        ({"grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "(日本){2}"}}, {"日本日本"}),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, {"a", "b"}),
        ({"structured_outputs": {"json": {"enum": ["x"]}}}, {'"x"'}),
        ({"structured_outputs": {"json": '{"const": null}', "regex": None}}, {"null"}),
        ({"structured_outputs": {"json": {"const": None}}}, {"null"}),
        (
            {
                "structured_outputs": {
                    "regex": "c",
                    "json_object": False,
                    "disable_fallback": True,
                    "disable_any_whitespace": False,
                    "disable_additional_properties": False,
                    "whitespace_pattern": None,
                }
            },
            {"c"},
        ),
        ({"structured_outputs": {"structural_tag": TAG}}, {"hi"}),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG["format"])}}, {"hi"}),
        ({"regex": "(日本){2}", "ebnf": "", "json_schema": ""}, {"日本日本"}),
        ({"ebnf": 'root ::= "a" | "b"'}, {"a", "b"}),
        ({"json_schema": '{"const": 5}'}, {"5"}),
        ({"json_schema": {"const": 6}}, {"6"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_constrained_completions(server: ServerProcess, fields: Any, texts: set[str]) -> None:
    body = {"prompt": ["a", "b c"], "max_tokens": 40, "n": 2, **fields}
    answer = server.post("/v1/completions", json=body).json()
    assert {choice["text"].strip() for choice in answer["choices"]} <= texts
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


def test_structured_outputs_in_every_chat(client: openai.OpenAI, server: ServerProcess) -> None:
    wanted = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=9, extra_body=wanted
    )
    assert answer.choices[0].message.content in ("yes", "no")
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=9, extra_body={"regex": "x{3}"}
    )
    assert answer.choices[0].message.content == "xxx"
    wanted = {"structured_outputs": {"json": {"const": None}}}
    said = server.post("/v1/messages", json={"messages": USER, "max_tokens": 9, **wanted})
    assert said.json()["content"][0]["text"] == "null"
    said = server.post("/v1/responses", json={"input": "hi", "max_output_tokens": 9, **wanted})
    assert said.json()["output"][0]["content"][0]["text"] == "null"


def test_constraints_that_ask_for_nothing(server: ServerProcess) -> None:
    free: dict[str, Any] = {"prompt": "a", "max_tokens": 8, "temperature": 0}
    nothing = {"structured_outputs": {"json_object": False}, "regex": "", "json_schema": {}}
    answers = [
        server.post("/v1/completions", json=body).json()["choices"][0]["text"]
        for body in (free, {**free, **nothing}, {**free, "structured_outputs": {}})
    ]
    assert answers == [answers[0]] * 3


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "parenthesis is not closed"),
        ({"guided_grammar": 'root ::= root "a"'}, "guided_grammar", "no finite text fulfils"),
        ({"guided_grammar": 'root ::= "a" b\nb ::= b "c"'}, "guided_grammar", "no finite text"),
        (
            # It has a text, which the request forbids.
            {"guided_grammar": 'root ::= "a" b | "~"\nb ::= b "c"', "bad_words": ["~"]},
            "guided_grammar",
            "allows no token",
        ),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": {"not": {}}}, "guided_json", "'not' is not supported"),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "got 'nothing'"),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format",
            "schema is for the type 'json_object' or 'json_schema'",
        ),
        ({"response_format": {"type": "regex"}}, "response_format", "the type needs pattern"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": []}},
            "response_format",
            "structures must be objects with begin, end, schema",
        ),
        ({"guided_choice": []}, "guided_choice", "1 to 4096"),
        ({"guided_choice": ["x" * 70000]}, "guided_choice", "at most 65536"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "send one"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "cannot be combined"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "not closed"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "'not' is not"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 4096"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
            "structured_outputs.json, structured_outputs.regex constrain the same text; send one",
        ),
        (
            {"structured_outputs": {"json_object": True}, "guided_regex": "a"},
            "structured_outputs.json_object",
            "send one",
        ),
        ({"regex": "a", "json_schema": "{}"}, "regex", "json_schema, regex constrain"),
        ({"regex": "(a"}, "regex", "parenthesis is not closed"),
        ({"regex": 5}, "regex", "string"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "not a field that this"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs", "structured_outputs.json"),
        ({"structured_outputs": "regex"}, "structured_outputs", "object"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "not supported",
        ),
        (
            {"structured_outputs": {"structural_tag": "{"}},
            "structured_outputs.structural_tag",
            "not JSON",
        ),
        (
            {"structured_outputs": {"structural_tag": {"structures": [], "triggers": ["a"]}}},
            "structured_outputs.structural_tag",
            "cannot be compiled",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format",
            "for the type 'json_schema'",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_wrong_constraints(
    server: ServerProcess, path: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    prompt = {"messages": USER} if "chat" in path else {"prompt": "a"}
    answer = server.post(path, json={**prompt, **fields})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "second"])
def test_forced_calls(client: openai.OpenAI, choice: str, stream: bool) -> None:
    named = {"type": "function", "function": {"name": choice}}
    ask: Any = {
        "model": "tiny",
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": "required" if choice == "required" else named,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "seed": 3,
    }
    if stream:
        chunks = [c.choices[0] for c in client.chat.completions.create(**ask, stream=True)]
        deltas = [d.function for c in chunks for d in c.delta.tool_calls or () if d.function]
        names = [d.name for d in deltas if d.name]
        arguments = "".join(d.arguments or "" for d in deltas)
        reason, content = chunks[-1].finish_reason, "".join(c.delta.content or "" for c in chunks)
    else:
        [whole] = client.chat.completions.create(**ask).choices
        calls = whole.message.tool_calls or []
        names = [call.function.name for call in calls]
        arguments = "".join(call.function.arguments for call in calls)
        reason, content = whole.finish_reason, whole.message.content or ""
    assert len(names) == 1
    assert names[0] in (("first", "second") if choice == "required" else ("second",))
    assert is_valid(json.loads(arguments))
    assert (reason, content) == ("tool_calls", "")


def test_wrong_tools(server: ServerProcess) -> None:
    wrong = {"name": "a", "parameters": {"not": {}}, "strict": True}
    tools = [{"type": "function", "function": wrong}]
    answer = server.post("/v1/chat/completions", json={"messages": USER, "tools": tools})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "tools[0].function.parameters" in error["message"]


@pytest.mark.parametrize("calls", [True, False])
def test_an_answer_or_calls(
    client: openai.OpenAI, byte_level_tokenizer: PreTrainedTokenizerFast, calls: bool
) -> None:
    """Beside tools a response format constrains what is not a call."""
    [opens] = byte_level_tokenizer.encode("<", add_special_tokens=False)
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        tools=TOOLS,
        response_format=FORMAT,
        n=16,
        seed=1,
        max_tokens=120,
        logit_bias={} if calls else {f"{opens}": -100},  # a call begins with it
    )
    complete = [choice for choice in answer.choices if choice.finish_reason != "length"]
    assert len(complete) > 2
    assert any(choice.message.tool_calls for choice in complete) == calls
    for choice in complete:
        texts = [c.function.arguments for c in choice.message.tool_calls or []]
        texts = texts or [choice.message.content or ""]
        assert all(is_valid(json.loads(text)) for text in texts)
