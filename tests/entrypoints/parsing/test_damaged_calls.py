"""Calls that are damaged: read alike however they are cut, and never as what nobody wrote."""

from __future__ import annotations

import json
import random
from collections import Counter

import msgspec
import pytest
from parser_texts import SPELLINGS, Call, Spelling, create_parser, cuttings, stream

from atom.entrypoints.parsing.deltas import ParsedMessage
from atom.entrypoints.parsing.output_parser import ChatOutputParser

SPELLED = pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)

JSON = [
    "{}",
    '{"a": "x"}',
    '{"text": "a {b} \\" [c] \\\\", "n": [1, {"m": null}]}',
    '{"text": "\\ud83d\\ude00 </tool_call> é", "b": true}',
    '{"path": "北京\\n", "text": ", }", "c": -1.5e3}',
]
STRINGS = [
    "{}",
    '{"path": "x"}',
    '{"text": "a {b} [c]", "path": "1"}',
    '{"text": "it\'s \\"q\\" é😀 (", "path": ""}',
]
PIECES = [*'{}[]()",:\\<>= \n', "\\ud83d", '"name"', '"arguments"', '{"name": "rm"}', "null", "["]


def damaged(spelling: Spelling, choose: random.Random) -> str:
    """One call or two, of whose text pieces are lost, doubled, put in or put in place of others."""
    values = STRINGS if spelling.is_typed else JSON
    number = choose.randint(1, min(2, spelling.num_calls))
    calls = [Call(choose.choice(["f", "get"]), choose.choice(values)) for _ in range(number)]
    text = spelling.spell([calls])
    pieces = [*PIECES, *spelling.markers]
    for _ in range(choose.randint(1, 3)):
        start = choose.randrange(len(text) + 1)
        end = start + choose.choice([1, 1, 2, 5, 20])
        put = choose.choice(["", "", choose.choice(pieces), text[start:end] * 2])
        keeps = choose.random() < 0.3
        text = text[:start] + put + text[start if keeps else end :]
    return text[: choose.randrange(len(text) + 1)] if choose.random() < 0.1 else text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _read(parser: ChatOutputParser, chunks: list[str]) -> tuple[ParsedMessage, object, object]:
    deltas = stream(parser, chunks, "stop")
    msgspec.json.encode(deltas)
    return ParsedMessage.of(deltas), parser.finish_reason, parser.incomplete_call


@SPELLED
@pytest.mark.parametrize("some", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_damaged_calls_are_read_alike_however_they_are_cut(spelling: Spelling, some: int) -> None:
    """Arguments of a call that is complete are JSON, or what the model wrote: a piece of the text,
    as it stands there.
    """
    met: Counter[str] = Counter()
    for seed in range(some):
        text = damaged(spelling, random.Random(f"{spelling.name} {seed}"))
        whole = _read(create_parser(spelling.name), [text])
        for chunks in cuttings(text):
            assert _read(create_parser(spelling.name), chunks) == whole, text
        message, reason, incomplete = whole
        assert (reason == "tool_calls") == (bool(message.tool_calls) and incomplete is None), text
        met[
            "incomplete" if incomplete is not None else "none" if reason == "stop" else "calls"
        ] += 1
        for index, call in enumerate(message.tool_calls):
            arguments = call.function.arguments
            if index != incomplete and not _is_json(arguments):
                met["as written"] += 1
                assert arguments in text, text
                assert spelling.name == "pythonic" or not spelling.is_typed, text
    assert met["calls"] > 0, met
    assert met["none"] + met["incomplete"] > 0, met
    if not spelling.is_typed:
        assert met["as written"] > 0, met


# No colon, no value, no word of JSON, half a surrogate pair for a name, no end.
NO_CALLS = [
    '{"name": "f", "arguments" {"a": 1}}',
    '{"name": "f", "arguments":}',
    '{"name": "f", "arguments": , "b": 1}',
    '{"name": "f", "arguments":: {"a": 1}}',
    '{"name": "f", "arguments": (1)}',
    '{"name": "f", "arguments": nul}',
    '{"name": "f", "arguments": a": 1}}',
    '{"name": "f", \\"arguments": {}}',
    '{"name": "f" = "arguments": {}}',
    '{"name": "\\ud83d", "arguments": {}}',
    '{"name": "f", "b": {"name": "rm", "arguments": {}',
    '{"name": "f", "arguments" {"name": "rm", "arguments": {}}}',
    '{"nam" {"name": "rm", "arguments": {}}}',
]


@pytest.mark.parametrize("call", NO_CALLS)
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>\n{}\n</tool_call>x"),
        ("hermes", "<tool_call>[{}]</tool_call>x"),
        ("llama3_json", "{}x"),
        ("mistral", '[TOOL_CALLS][{{"name": "g", "arguments": {{}}}}, {}]x'),
    ],
)
def test_what_is_no_object_with_a_name_and_arguments_is_no_call(
    parser: str, text: str, call: str
) -> None:
    text = text.format(call) if "{{" in text else text.replace("{}", call)
    for chunks in cuttings(text):
        answer = create_parser(parser)
        message = ParsedMessage.of(stream(answer, chunks, "stop"))
        names = [call.function.name for call in message.tool_calls]
        assert names == (["g"] if parser == "mistral" else [])
        assert (message.content or "").endswith("x")
        assert "".join(call.split()) in "".join((message.content or "").split())
        assert answer.incomplete_call is None


@pytest.mark.parametrize(
    ("parser", "text", "calls", "content"),
    [
        # Quotes, braces and backslashes within strings end nothing.
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\"}\\", "b": ["{\\\"", {}]}}'
         "</tool_call>.",
         [("f", r'{"a": "\"}\\", "b": ["{\\\"", {}]}')], "."),
        ("mistral", r'[TOOL_CALLS]f[ARGS]{"a": "\\\"{\\", "b": "}\""}.',
         [("f", r'{"a": "\\\"{\\", "b": "}\""}')], "."),
        # A comma is not missed.
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>', [("f", "{}")], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": 0}</tool_call>', [("f", "0")], ""),
        ("hermes", '<tool_call>{"arguments": 1, "name": "f"}</tool_call>', [("f", "1")], ""),
        # What stands behind arguments within the object opens no other call.
        ("hermes", '<tool_call>{"name": "f", "arguments": {} {"name": "rm", "arguments": {}}}',
         [("f", "{}")], '{"name": "rm", "arguments": {}}}'),
        ("llama3_json", '{"name": "f", "parameters": {} {"name": "rm", "parameters": {}}}',
         [("f", "{}")], '{"name": "rm", "parameters": {}}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {} {"name": "rm", "arguments": {}}}]',
         [("f", "{}")], '{"name": "rm", "arguments": {}}}]'),
        # Arguments that are no JSON go on to a marker.
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": <b>}}][TOOL_CALLS]g[ARGS]{}',
         [("f", '{"a": <b>}}]'), ("g", "{}")], ""),
        ("mistral_named", '[TOOL_CALLS]f[ARGS]{"a": <b>}[TOOL_CALLS]g[ARGS]{}',
         [("f", '{"a": <b>}'), ("g", "{}")], ""),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1</tool_call> b',
         [("f", '{"a": 1')], "b"),
        # Calls without a name are left out, with all that is theirs.
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
         '<|open|>call tol="g" index="2"<|sep|><|open|>argument key="a" type="string"<|sep|>'
         '<|open|>call tool="rm" index="3"<|sep|><|close|>argument<|sep|><|close|>call<|sep|>',
         [("f", "{}")], ""),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call><tool_call>\n"
         "<function=>\n<parameter=a>\n<function=rm>\n</parameter>\n</function>\n</tool_call>",
         [("f", "{}")], ""),
        ("gpt_oss", "<|channel|>commentary to=functions. json<|message|>{}<|call|>", [], "{}"),
    ],
)  # fmt: skip
def test_damage_ends_with_its_call(
    parser: str, text: str, calls: list[tuple[str, str]], content: str
) -> None:
    for chunks in cuttings(text):
        answer = create_parser(parser)
        message = ParsedMessage.of(stream(answer, chunks, "stop"))
        found = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert found == calls
        assert (message.content or "").strip() == content
        assert answer.incomplete_call is None


def test_arguments_that_nest_without_end_are_no_object() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": ' + "[" * 200_000
    answer = create_parser("mistral_named")
    stream(answer, [text], "length")
    assert (answer.finish_reason, answer.incomplete_call) == ("length", 0)
