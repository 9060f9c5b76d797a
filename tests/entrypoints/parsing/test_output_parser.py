"""The output parser: every format, however its text is cut, and the failures that are known."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parser_texts import (
    HERMES,
    KIMI,
    SPELLINGS,
    Call,
    Part,
    Spelling,
    create_parser,
    cuttings,
    read,
    stream,
)

from atom.entrypoints.parsing.deltas import FunctionCall, ParsedMessage, ToolCall
from atom.entrypoints.parsing.output_parser import ChatOutputParser
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS

FEW = settings(max_examples=12)
SPELLED = pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)

LOOK_ALIKES = (
    "<| <|tool <|tool_calls_section_begin| <tool_cal </tool <｜tool▁ <thin </ < ``` functions. :0"
)
WORDS = [*LOOK_ALIKES.split(), '{"name"', "<|im_end|>", "<|tool_calls|>", *'\\"{}[>|; \n\u3000é🚀']
WORDS += ["北京的天气", "json", "plain words"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
# White space alone between two markers separates them and is no content.
CONTENTS = TEXTS.filter(lambda text: not text.isspace())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent),
    st.dictionaries(TEXTS, VALUES, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
NAMES = st.sampled_from(["f", "get_weather", "a-b", "mcp.server.tool_1"])
# Formats without JSON: strings, as `json.dumps` writes them.
TYPED_ARGUMENTS = st.dictionaries(st.sampled_from(["path", "text", "a_1"]), TEXTS, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)


@st.composite
def answers(draw: st.DrawFn, spelling: Spelling) -> tuple[str, bool, ParsedMessage]:
    """A text, whether it starts within reasoning, and what it means."""
    arguments = TYPED_ARGUMENTS if spelling.is_typed else ARGUMENTS
    size = min(3, spelling.num_calls)
    calls_ = st.lists(st.builds(Call, NAMES, arguments), min_size=1, max_size=size)
    sectioned = st.lists(CONTENTS | calls_, max_size=4)
    alone = st.one_of(CONTENTS, calls_).map(lambda part: [part])
    parts: list[Part] = draw(sectioned if spelling.is_sectioned else alone)
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [call for part in parts if not isinstance(part, str) for call in part]
    reasoning = draw(st.none() | TEXTS)
    for text in (content, reasoning or "", *(call.arguments for call in calls)):
        assume(not any(marker in text for marker in spelling.markers))
    assume(spelling.is_sectioned or not content.lstrip().startswith(("{", "[")))
    text, reasons = spelling.spell(parts), reasoning is not None
    if reasons:
        text = f"{reasoning}</think>{text}"
        if draw(st.booleans()):
            text, reasons = f"<think>{text}", False
    expected = [
        ToolCall(spelling.expect_id(call, index) or "", FunctionCall(call.name, call.arguments))
        for index, call in enumerate(calls)
    ]
    return text, reasons, ParsedMessage(content or None, reasoning or None, expected)


def _comparable(spelling: Spelling, message: ParsedMessage) -> Any:
    calls = [
        (call.id if spelling is KIMI else None, call.function.name, call.function.arguments)
        for call in message.tool_calls
    ]
    return message.content, message.reasoning_content, calls


@SPELLED
@FEW
@given(data=st.data())
def test_what_is_written_is_read_however_it_is_cut(spelling: Spelling, data: st.DataObject) -> None:
    text, reasons, expected = data.draw(answers(spelling))
    whole = create_parser(spelling.name, reasons=reasons).parse_complete(text, "stop")
    assert _comparable(spelling, whole) == _comparable(spelling, expected)
    for chunks in cuttings(text):
        parser = create_parser(spelling.name, reasons=reasons)
        assert read(parser, chunks) == whole
        assert parser.finish_reason == ("tool_calls" if whole.tool_calls else "stop")


@SPELLED
@settings(max_examples=6)
@given(data=st.data())
def test_a_truncated_answer_is_what_had_come(spelling: Spelling, data: st.DataObject) -> None:
    text, reasons, expected = data.draw(answers(spelling))
    for end in range(len(text)):
        parser = create_parser(spelling.name, reasons=reasons)
        cut = parser.parse_complete(text[:end], "length")
        if end % (1 + len(text) // 20) == 0:  # by characters, as often as time allows
            assert read(parser, text[:end], "length") == cut
            assert parser.finish_reason == "length"
        assert len(cut.tool_calls) <= len(expected.tool_calls)
        pairs = [
            (cut.content, expected.content),
            (cut.reasoning_content, expected.reasoning_content),
        ]
        for call, whole in zip(cut.tool_calls, expected.tool_calls, strict=False):
            assert call.function.name == whole.function.name
            pairs.append((call.function.arguments, whole.function.arguments))
        for said, meant in pairs:
            assert not any(marker in (said or "") for marker in spelling.markers)
            # At the very end may stand what could have become a marker.
            rest = _after_common(said or "", meant or "")
            assert text[:end].endswith(rest.replace("\\n", "\n") if spelling.is_typed else rest)


def _after_common(said: str, meant: str) -> str:
    """The rest of `said` from where it differs from `meant`."""
    same = (a == b for a, b in zip(said, meant, strict=False))
    return said[sum(itertools.takewhile(bool, same)) :]


@pytest.mark.parametrize("reasons", [False, True])
@SPELLED
@FEW
@given(data=st.data())
def test_any_soup_is_read_alike_however_it_is_cut(
    spelling: Spelling, reasons: bool, data: st.DataObject
) -> None:
    pieces = st.sampled_from([*spelling.markers, *WORDS, '{"name": "f", "arguments": {"a": 1}}'])
    text = "".join(data.draw(st.lists(pieces, max_size=15)))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    whole = create_parser(spelling.name, reasons=reasons).parse_complete(text, reason)
    for chunks in cuttings(text):
        assert read(create_parser(spelling.name, reasons=reasons), chunks, reason) == whole


def test_no_marker_in_a_string_of_what_is_no_call_is_content() -> None:
    message = create_parser("llama3_json").parse_complete('{"a<|python_tag|>": 1} b', "stop")
    assert message.content == '{"a": 1} b'


@pytest.mark.parametrize("reasons", [False, True])
@SPELLED
@FEW
@given(data=st.data())
def test_no_marker_is_ever_content(spelling: Spelling, reasons: bool, data: st.DataObject) -> None:
    words = [word for word in WORDS if not any(word[:1] == m[:1] for m in spelling.markers)]
    pieces = st.sampled_from([*spelling.markers, *words])
    text = "".join(data.draw(st.lists(pieces, max_size=15)))
    message = create_parser(spelling.name, reasons=reasons).parse_complete(text, "stop")
    said = [message.content, message.reasoning_content]
    assert not any(marker in (text or "") for text in said for marker in spelling.markers)


@SPELLED
@FEW
@given(text=TEXTS)
def test_only_what_may_become_a_marker_is_held_back(spelling: Spelling, text: str) -> None:
    assume(not any(marker in text for marker in spelling.markers))
    text = "x" + text
    parser, said = create_parser(spelling.name), ""
    for end in range(1, len(text) + 1):
        said += "".join(delta.content or "" for delta in parser.feed(text[end - 1]))
        starts = {m[:n] for m in spelling.markers for n in range(1, len(m))}
        held = max((n for n in range(end + 1) if text[end - n : end] in starts), default=0)
        assert said == text[: end - held]


@SPELLED
def test_names_come_first_and_arguments_stream(spelling: Spelling) -> None:
    value = "x" * 1000
    text = spelling.spell([[Call("f", json.dumps({"text": value}))]])
    parser = create_parser(spelling.name)
    start = text.index(value)
    head = parser.feed(text[: start + 1])
    assert [piece.function.name for d in head for piece in d.tool_calls or ()][:1] == ["f"]
    said = "".join(p.function.arguments for d in head for p in d.tool_calls or ())
    for i in range(start + 1, start + len(value)):
        said += "".join(
            p.function.arguments for d in parser.feed(text[i]) for p in d.tool_calls or ()
        )
        assert said == ('{"text": "' + value[: i + 1 - start] if spelling.streams else "")


@pytest.mark.usefixtures("uncollected")
@SPELLED
def test_time_is_linear(spelling: Spelling) -> None:
    """Eight times the text takes less than thirty times as long, not sixty-four."""

    def seconds(size: int) -> float:
        value = {"path": "北京 </x> <|", "text": 'a "b" \\ \n' * size}
        arguments = json.dumps(value, ensure_ascii=False)
        text = "好" * size + spelling.spell([[Call("f", arguments)]])
        text = text if spelling.is_sectioned else text.lstrip("好")
        parser = create_parser(spelling.name)
        start = time.thread_time()
        deltas = stream(parser, text, "stop")
        taken = time.thread_time() - start
        assert ParsedMessage.of(deltas).tool_calls[0].function.arguments == arguments
        return taken

    long, short = (min(seconds(size) for _ in range(3)) for size in (2000, 250))
    assert long < 30 * short


def test_16_streams_at_once_are_16_alone() -> None:
    texts = []
    for i in range(4):
        calls: list[Part] = [[Call("f", f'{{"i": {i}}}')]]
        for spelling in SPELLINGS:
            around = ["回答 ", *calls, f" end {i}"] if spelling.is_sectioned else calls
            texts.append(spelling.spell(around))
    names = [spelling.name for _ in range(4) for spelling in SPELLINGS]
    parsers = [create_parser(name) for name in names]
    deltas: list[list[Any]] = [[] for _ in parsers]
    for position in range(max(map(len, texts))):
        for parser, text, said in zip(parsers, texts, deltas, strict=True):
            said += parser.feed(text[position : position + 1])
    for parser, text, said, name in zip(parsers, texts, deltas, names, strict=True):
        said += parser.finish("stop")
        assert ParsedMessage.of(said) == create_parser(name).parse_complete(text, "stop")


S, E = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
B, A, C = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def test_reasoning_ends_with_its_tag_or_with_a_call() -> None:
    section = f"{S}{B}functions.f:0{A}{{}}{C}{E}"
    for text, reasoning, content in (
        ("why</think>so", "why", "so"),
        ("<think>why</think>so", "why", "so"),
        (f"why{section}so", "why", "so"),
        (f"why{E}not{section}", "whynot", None),
        (f"why</think>\n\n{section}", "why", None),
        ("why</think>\n\nso", "why", "\n\nso"),
        ("why", "why", None),
        ("</think>so", None, "so"),
        ("why</thi", "why</thi", None),
    ):
        for chunks in cuttings(text):
            message = read(create_parser("kimi_k2", reasons=True), chunks)
            assert (message.reasoning_content, message.content) == (reasoning, content), text
            assert len(message.tool_calls) == ("section_begin" in text)


def test_without_parsers_everything_is_content() -> None:
    text = f"<think>a</think>{S}{B}functions.f:0{A}{{}}{C}{E}"
    parser = ChatOutputParser(None, None, None, True)
    assert [delta.content for delta in parser.feed(text)] == [text]
    assert parser.finish("stop") == []
    assert parser.finish_reason == "stop"


HERMES_TEXTS = [
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', None, 1),
    ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', None, 1),
    ('<tool_call>{"name": "f"}</tool_call>', None, 1),
    ('<tool_call>{"name": "f", "id": 3, "arguments": {}}}</tool_call>', "}", 1),
    ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>b', "b", 1),
    ('<tool_call>{"name": "f", "arguments": {}}\n{"name": "g"}</tool_call>', None, 2),
    ('<tool_call>{"name": "f"}<tool_call>{"name": "g"}', None, 2),
    ("<tool_call>no call</tool_call>", "no call", 0),
    ('<tool_call>{"nam": 1}</tool_call>', '{"nam": 1}', 0),
    ('<tool_call>{"name": ""}</tool_call>', '{"name": ""}', 0),
    ('<tool_call>{"name": "f', None, 0),
    ("a <tool_call", "a <tool_call", 0),
    ("a </tool_call>b", "a b", 0),
]


@pytest.mark.parametrize(("text", "content", "num_calls"), HERMES_TEXTS)
def test_hermes(text: str, content: str | None, num_calls: int) -> None:
    for chunks in cuttings(text):
        message = read(create_parser("hermes"), chunks)
        assert message.content == content
        assert [call.function.name for call in message.tool_calls] == ["f", "g"][:num_calls]


LLAMA_TEXTS = [
    ('{"name": "f", "parameters": {}}', None, 1),
    ('\n{"type": "function", "name": "f", "arguments": {}}', None, 1),
    ('<|python_tag|>{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', None, 2),
    ('{"parameters": {"name": "x"}, "name": "f"};{"name": "g", "parameters": {', None, 2),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', 0),
    ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', 0),
    ('{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', 0),
    ('{"name": "f"}', '{"name": "f"}', 0),
    ('{"name": "f", "param', '{"name": "f", "param', 0),
    (' {"name": 5}', ' {"name": 5}', 0),
    ('Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', 0),
    ('{"name": "f", "parameters": {}} done', " done", 1),
]


@pytest.mark.parametrize(("text", "content", "num_calls"), LLAMA_TEXTS)
def test_llama(text: str, content: str | None, num_calls: int) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    for chunks in cuttings(text):
        message = read(ChatOutputParser("llama3_json", "think_tags", tools, False), chunks)
        assert message.content == content
        assert [call.function.name for call in message.tool_calls] == ["f", "g"][:num_calls]


DS, DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DB, DC = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_TEXTS = [
    (f"{DS}{DB}f\n```json\n{{}}\n```{DC}{DE}", None, ["{}"]),
    (f"{DS}{DB}f\n{{}}{DC}{DE}", None, ["{}"]),
    (f"{DS}{DB}f```json{{}}```{DC}{DE}", None, ["{}"]),
    (f"{DS}{DB}\nf \n\n```\n{{}}\n```\n{DC}{DE}", None, ["{}"]),
    (f"{DS}{DB}f\n```json\n{DC}{DE}", None, ["{}"]),
    (f"{DS}{DB}f{DC}{DE}a", "a", ["{}"]),
    (f'{DS}{DB}f\n```json\n{{"a": "```"}}\n```{DC}{DE}', None, ['{"a": "```"}']),
    (f'{DS}{DB}f\n```json\n{{"a": "``', None, ['{"a": "``']),
    (f"{DS}{DB}f\n```json\n{{}}\n``", None, ["{}"]),
    (f"{DS}{DB}f\n```js", None, [""]),
    (f"{DS}{DB}f", None, []),
    (f"{DS}<｜tool▁call▁begin｜>func", None, []),
]


@pytest.mark.parametrize(("text", "content", "arguments"), DEEPSEEK_TEXTS)
def test_deepseek(text: str, content: str | None, arguments: list[str]) -> None:
    for chunks in cuttings(text):
        message = read(create_parser("deepseek_v3"), chunks)
        assert message.content == content
        assert [call.function.arguments for call in message.tool_calls] == arguments


def test_ids_of_the_server_differ_between_answers_and_calls() -> None:
    text = HERMES.spell([[Call("f", "{}"), Call("f", "{}")]])
    ids = set()
    for salt in ("a", "b"):
        parser = ChatOutputParser("hermes", None, None, False, id_salt=salt)
        ids |= {call.id for call in parser.parse_complete(text, "stop").tool_calls}
        assert parser.parse_complete(text, "stop") == read(parser, text)
    assert len(ids) == 4


def test_formats_by_name() -> None:
    with pytest.raises(ValueError, match=r"no tool parser is called 'nosuch'; .*kimi_k2"):
        ChatOutputParser("nosuch", None, None, False)
    with pytest.raises(ValueError, match="no reasoning parser"):
        ChatOutputParser(None, "nosuch", None, False)
    assert {"kimi_k2", "hermes", "llama3_json", "deepseek_v3"} <= TOOL_PARSERS.keys()
    assert {"kimi_k2", "deepseek_r1", "qwen3"} <= REASONING_PARSERS.keys()


def test_nothing_comes_after_the_end() -> None:
    parser = create_parser("kimi_k2")
    parser.finish("stop")
    with pytest.raises(ValueError, match="finished"):
        parser.feed("x")


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("<|im_assistant|>assistant<|im_middle|><think>", "", True),
        ("<|im_assistant|>assistant<|im_middle|><think></think>", "", False),
        ("<|Assistant|><think>\n", "", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("<user>what is <think>?<assistant>", "", False),
        ("<assistant><think>half a th", "<think>half a th", True),
        ("<assistant><think>all</think>So", "<think>all</think>So", False),
        ("<assistant><think>half", "half", True),
        ("<assistant>half", "half", False),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(
    prompt: str, continued: str, inside: bool
) -> None:
    assert REASONING_PARSERS["kimi_k2"].is_open_after(prompt, continued) is inside


def test_an_answer_that_is_continued_is_in_reasoning_only_if_it_was_opened() -> None:
    """Elsewhere than at an answer's begin nothing is implied."""
    implied = replace(REASONING_PARSERS["kimi_k2"], is_implied=True)
    assert implied.is_open_after("<user>hi<assistant>")
    assert not implied.is_open_after("<user>hi<assistant>Sure", "Sure")
    assert implied.is_open_after("<user>hi<assistant><think>Sure", "Sure")
    assert not implied.is_open_after("<user>hi<assistant></think>")
