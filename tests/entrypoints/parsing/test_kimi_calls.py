"""Kimi's tool calls, case by case: what an answer's text means, whole and cut anywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from parser_texts import read

from atom.entrypoints.parsing.output_parser import ChatOutputParser

S, E = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
S1, E1 = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
B, A, C = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
EOT = "<|im_end|>"
F = f"{B}functions.f:0{A}{{}}{C}"
G = f"{B}functions.g:1{A}[1]{C}"

Calls = list[tuple[str, str, str]]
Case = tuple[str, str | None, Calls]
CALL_F = ("functions.f:0", "f", "{}")
CALL_G = ("functions.g:1", "g", "[1]")


def _tool(name: str, *keys: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in keys}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = _tool("get_weather", "city", "unit")
FLIGHT = _tool("book_flight", "city")
READ = _tool("read_file", "path")


def _call(head: str, arguments: str) -> str:
    return f"{S}{B}{head}{A}{arguments}{C}{E}"


def _cuttings(text: str) -> Iterator[list[str]]:
    """Whole, by characters, and in two at every place."""
    yield [text]
    yield list(text)
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]


def _check(case: Case, tools: list[dict[str, Any]] | None = None, reason: str = "stop") -> None:
    text, content, calls = case
    for chunks in _cuttings(text):
        message = read(ChatOutputParser("kimi_k2", "kimi_k2", tools, False), chunks, reason)
        assert message.content == content, chunks
        found = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
        assert found == calls, chunks


PLACES: list[Case] = [
    # Text around sections is content.
    (f"hi{S}{F}{E}", "hi", [CALL_F]),
    (f"I'll check.\n\n{S}{F}{E}", "I'll check.\n\n", [CALL_F]),
    (f"hi{S}{F}{E}there", "hithere", [CALL_F]),
    (f"{S}{F}{E}\n\nDone.", "\n\nDone.", [CALL_F]),
    (f"{S}{F}{E} and {S}{G}{E}", " and ", [CALL_F, CALL_G]),
    (f"{S}{F}{E}{S}{G}{E}", None, [CALL_F, CALL_G]),
    # White space beside calls is not.
    (f"\n{S}{F}{E}", None, [CALL_F]),
    (f"{S}\n{F}\n{E}", None, [CALL_F]),
    (f"{S} {B} functions.f:0 \n{A}\n {{}} \n{C}\n{E}", None, [CALL_F]),
    (f"{S}{F}\n\n{G}{E}", None, [CALL_F, CALL_G]),
    (f"{S}{F}{E}\n", None, [CALL_F]),
    (f"{S}{F}{E} \n\t ", None, [CALL_F]),
    (f"{S}{F}{E}\n\n{S}{G}{E}\n", None, [CALL_F, CALL_G]),
    # Nor is text in a section with calls.
    (f"{S} spurious noise {F}{E}", None, [CALL_F]),
    (f"{S}{F}, and then {G}{E}", None, [CALL_F, CALL_G]),
    (f"{S}{F}more{E}.", ".", [CALL_F]),
    (f"{S}said{F}more{E}", None, [CALL_F]),
    # A turn's end is no text.
    (f"{S}{F}{E}{EOT}", None, [CALL_F]),
    (f"{S}{F}{E}\n{EOT}\n", None, [CALL_F]),
    (f"{S}{F}{EOT}", None, [CALL_F]),
    (f"{S}{F}{EOT}bye", "bye", [CALL_F]),
    (f"{S}{EOT}bye{S}{F}{E}", "bye", [CALL_F]),
    (f"{S}{B}functions.f:0{A}{{}}{EOT}", None, [CALL_F]),
    (f"hi{EOT}", "hi", []),
    # Markers that are missing, singular, or make no sense.
    (f"{S1}{F}{E1}ok", "ok", [CALL_F]),
    (f"{F}", None, [CALL_F]),
    (f"{F}{G}", None, [CALL_F, CALL_G]),
    (f"{F}\nDone", "\nDone", [CALL_F]),
    (f"{S}{F}", None, [CALL_F]),
    (f"{S}{B}functions.f:0{A}{{}}{B}functions.g:1{A}[1]{E}", None, [CALL_F, CALL_G]),
    (f"{S}{B}functions.f:0{A}{{}}{E}", None, [CALL_F]),
    (f"{E}a{C}b{A}c", "abc", []),
    (f"{S}{E}nothing", "nothing", []),
    (f"{S}only words{E}", "only words", []),
    (f"a</think>b<think>c</think>d{S}{F}{E}", "abd", [CALL_F]),
    ("<|tool_calls_section_begin|", "<|tool_calls_section_begin|", []),
]


@pytest.mark.parametrize("case", PLACES)
def test_text_around_calls(case: Case) -> None:
    _check(case)


ARGUMENTS = [
    ("", "{}"),
    (" \n ", "{}"),
    ('{"a":  1}', '{"a":  1}'),
    ('\n{"a": 1}\n', '{"a": 1}'),
    ('{\n  "a": "北京 🚀"\n}', '{\n  "a": "北京 🚀"\n}'),
    ('{"a": }}', '{"a": }}'),
    ('{"html": "<div>x</div>"}', '{"html": "<div>x</div>"}'),
    ("{</think>}", "{</think>}"),
    ('{"a": "unterminated', '{"a": "unterminated'),
    ('{"path": "C:\\\\"}', '{"path": "C:\\\\"}'),
    ('{"q": "\\"}"}', '{"q": "\\"}"}'),
]


@pytest.mark.parametrize(("written", "arguments"), ARGUMENTS)
def test_arguments_are_the_exact_text(written: str, arguments: str) -> None:
    call = ("functions.f:0", "f", arguments)
    _check((f"{_call('functions.f:0', written)}.", ".", [call]))


@pytest.mark.parametrize("marker", [S, S1, B, A, C, E, E1, EOT, "<think>", "</think>"])
def test_markers_in_strings_are_text(marker: str) -> None:
    arguments = json.dumps({"text": f"a {marker} b", "more": f"{marker}x"})
    call = ("functions.f:0", "f", arguments)
    _check((f"x{_call('functions.f:0', arguments)}y", "xy", [call]))


IDS: list[tuple[str, str | None]] = [
    ("functions.f:0", "f"),
    ("functions.f:12", "f"),
    ("functions.\nf:\n0", "f"),
    ("functions.a.b-c_d:12", "a.b-c_d"),
    ("functions.mcp__portal__search-documents:0", "mcp__portal__search-documents"),
    ("search:0", "search"),
    ("search", "search"),
    ("functions.f:abc", "f"),
    ("functions.f:", "f"),
    ("functions.call_me:0", "call_me"),
    # Ids that name nothing, where no tool is known that they could be of.
    ("functions.invalid.0", None),
    ("call_8f3a", None),
    ("toolu_01AbC", None),
    ("chatcmpl-tool-5f2c", None),
    ("0", None),
    (":0", None),
    ("functions.:0", None),
    ("", None),
]


@pytest.mark.parametrize(("call_id", "name"), IDS)
def test_ids(call_id: str, name: str | None) -> None:
    spelled = "".join(call_id.split())
    calls = [] if name is None else [(spelled, name, "{}")]
    _check((f"a{_call(call_id, '{}')}b", "ab", calls))


BOTH = '{"city": "Tokyo", "unit": "c"}'
NAMELESS: list[tuple[str, str, list[dict[str, Any]], str | None]] = [
    ("0", BOTH, [WEATHER], "get_weather"),
    ("0", '{"city": "Tokyo"', [WEATHER], "get_weather"),
    ("call_8f3a", BOTH, [WEATHER], "get_weather"),
    ("functions.:0", "{}", [WEATHER], "get_weather"),
    ("0", BOTH, [READ, WEATHER], "get_weather"),
    ("call_8f3a", BOTH, [READ, WEATHER, FLIGHT], "get_weather"),
    ("0", '{"city": "Tokyo"}', [READ, WEATHER], "get_weather"),
    ("0", '{"city": "x"}', [_tool("a", "city", "x", required=("x",)), FLIGHT], "book_flight"),
    # Several fit, or none.
    ("0", '{"city": "Tokyo"}', [WEATHER, FLIGHT], None),
    ("0", '{"other": 1}', [WEATHER, READ], None),
    ("0", '{"city": "Tokyo"', [WEATHER, READ], None),
    ("0", '["city"]', [WEATHER, READ], None),
    ("call_8f3a", "{}", [WEATHER, FLIGHT], None),
    # A name is a name, also of an unknown tool.
    ("functions.other:0", BOTH, [WEATHER], "other"),
    ("get_weather", BOTH, [READ, WEATHER], "get_weather"),
    ("call_me", "{}", [_tool("call_me"), READ], "call_me"),
]


@pytest.mark.parametrize(("call_id", "arguments", "tools", "name"), NAMELESS)
def test_calls_without_a_name(
    call_id: str,
    arguments: str,
    tools: list[dict[str, Any]],
    name: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = [] if name is None else [(call_id, name, arguments)]
    with caplog.at_level(logging.WARNING):
        _check((f"a{_call(call_id, arguments)}", "a", calls), tools)
    assert ("names no tool" in caplog.text) is (name is None)


def test_a_call_that_is_left_out_takes_no_other_with_it() -> None:
    text = f"{S}{B}0{A}{{}}{C}{F}{B}call_1{A}{{}}{C}{G}{E}"
    _check((text, None, [CALL_F, CALL_G]), [WEATHER, FLIGHT])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (f'{S}{B}functions.f:0{A}{{"a": "北', '{"a": "北'),
        (f'{S}{B}functions.f:0{A}{{"a": 1}}', '{"a": 1}'),
        (f'{S}{B}functions.f:0{A}{{"a": 1}}<|tool_call_e', '{"a": 1}<|tool_call_e'),
        (f"{S}{B}functions.f:0{A}", ""),
        (f"{S}{B}functions.f:0", None),
        (f"{S}{B}functio", None),
        (f"{S}{B}", None),
        (f"{S}\n", None),
    ],
)
def test_what_was_cut(text: str, arguments: str | None) -> None:
    calls = [] if arguments is None else [("functions.f:0", "f", arguments)]
    _check((text, None, calls), reason="length")
