"""Chats with tools and reasoning, from the request to the engine's parameters and the prompt."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.api import prepare_chat
from atom.entrypoints.chat.format import ChatFormat
from atom.entrypoints.chat.generation import Generation
from atom.entrypoints.chat.protocol import ChatCompletionRequest
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.server_options import OptionError, ServerOptions
from atom.outputs import CompletionOutput, RequestMetrics, RequestOutput
from atom.text.detokenizer import create_vocabulary

OPTIONS = ServerOptions(
    tool_call_parser="kimi_k2", reasoning_parser="kimi_k2", enable_auto_tool_choice=True
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "write-file")
]
USER = [{"role": "user", "content": "hi"}]
# Says all that it is given; arguments as they are, which makes it one of text.
TEXT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }};{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.arguments }}]{% endfor %}"
    "{% if m.tool_call_id %}## Return of {{ m.tool_call_id }}{% endif %};{% endfor %}"
    "{{ reasoning_effort }}{% if add_generation_prompt %}<think>"
    "{% if thinking is false %}</think>{% endif %}{% endif %}"
)
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city":  "北京"}<|tool_call_end|><|tool_calls_section_end|>'
)


def _prepare(
    tokenizer: PreTrainedTokenizerFast,
    options: ServerOptions = OPTIONS,
    template: str | None = TEXT_TEMPLATE,
    **fields: Any,
) -> tuple[Generation, ChatFormat]:
    body = ChatCompletionRequest.model_validate({"messages": USER, "tools": TOOLS, **fields})
    encoder = PromptEncoder(tokenizer, 4000, template)
    return prepare_chat(body, "m", encoder, create_vocabulary(tokenizer), options, {})


def _prompt(tokenizer: PreTrainedTokenizerFast, **fields: Any) -> str:
    generation, _ = _prepare(tokenizer, **fields)
    text = generation.prompts[0].text
    assert text is not None
    return text


def _answer(generation: Generation, choices: ChatFormat, text: str, reason: str) -> dict[str, Any]:
    output = CompletionOutput(0, text, [], finish_reason=reason)
    request = RequestOutput("r", None, [], [output], True, RequestMetrics(0.0))
    return choices.whole(0, generation.prompts[0], request, output)


def test_a_call_goes_out_and_its_history_comes_back(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    generation, choices = _prepare(byte_level_tokenizer)
    answer = _answer(generation, choices, f"why{SECTION}", "stop")
    assert answer["finish_reason"] == "tool_calls"
    message = answer["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == "why"
    assert message["tool_calls"] == [
        {
            "id": "functions.get_weather:0",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city":  "北京"}'},
        }
    ]
    result = {"role": "tool", "content": "sunny", "tool_call_id": "functions.get_weather:0"}
    prompt = _prompt(byte_level_tokenizer, messages=[*USER, message, result])
    assert 'assistant:(why)[functions.get_weather:0 {"city":  "北京"}];' in prompt
    assert "tool:sunny## Return of functions.get_weather:0;" in prompt


def test_templates_that_want_objects_get_objects(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    prompt = _prompt(byte_level_tokenizer, template=template, messages=messages)
    assert prompt == '{"a": 1}'
    call["function"] = {"name": "f", "arguments": '{"a":'}
    cut = _prompt(byte_level_tokenizer, template=template, messages=messages)
    assert json.loads(cut) == '{"a":'
    assert '{"a":]' in _prompt(byte_level_tokenizer, messages=messages)


def test_the_template_gets_tools_and_variables(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = _prompt(byte_level_tokenizer, reasoning_effort="low")
    assert '"name": "get_weather"' in prompt
    assert "low<think>" in prompt
    assert "get_weather" not in _prompt(byte_level_tokenizer, tool_choice="none")
    assert "get_weather" in _prompt(
        byte_level_tokenizer,
        tool_choice={"type": "function", "function": {"name": "write-file"}},
    )


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({}, "a", "b"),
        ({"chat_template_kwargs": {"thinking": False}}, None, "ab"),
        ({"continue_final_message": True, "add_generation_prompt": False}, None, "ab"),
    ],
)
def test_the_prompt_decides_where_the_answer_starts(
    byte_level_tokenizer: PreTrainedTokenizerFast,
    fields: dict[str, Any],
    reasoning: str | None,
    content: str,
) -> None:
    messages = [*USER, {"role": "assistant", "content": "So"}]
    generation, choices = _prepare(byte_level_tokenizer, messages=messages, **fields)
    message = _answer(generation, choices, "a</think>b", "stop")["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_continuing_a_message_within_its_reasoning(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [*USER, {"role": "assistant", "content": "<think>half"}]
    generation, choices = _prepare(
        byte_level_tokenizer, messages=messages, continue_final_message=True
    )
    message = _answer(generation, choices, " way</think>b", "stop")["message"]
    assert (message["reasoning_content"], message["content"]) == (" way", "b")


def test_what_was_cut_says_length(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    generation, choices = _prepare(byte_level_tokenizer)
    answer = _answer(generation, choices, SECTION[: SECTION.index("京")], "length")
    assert answer["finish_reason"] == "length"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city":  "北'


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_in_which_the_text_ends_is_no_call_to_make(
    reason: str, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Neither finish reason nor the call say that it is whole, whatever ended it."""
    generation, choices = _prepare(byte_level_tokenizer)
    begin, end = SECTION.index("{"), SECTION.index("}") + 1
    # A marker is a token: it is there or not.
    marker = SECTION.index("<|tool_call_end|>") + len("<|tool_call_end|>")
    for cut in (*range(begin, end + 1), marker, len(SECTION)):
        answer = _answer(generation, choices, SECTION[:cut], reason)
        assert answer["message"]["tool_calls"]
        if cut < end:
            assert (answer["finish_reason"], answer["incomplete_tool_call"]) == (reason, 0)
        else:
            # Its end may be left to that of the text.
            assert "incomplete_tool_call" not in answer
            assert answer["finish_reason"] == ("tool_calls" if reason == "stop" else "length")
    two = SECTION.replace("<|tool_calls_section_end|>", "")
    two += two.removeprefix("<|tool_calls_section_begin|>").replace(":0", ":1")
    answer = _answer(generation, choices, two[: two.rindex("}")], reason)
    assert (answer["finish_reason"], answer["incomplete_tool_call"]) == (reason, 1)


def test_a_repeated_call_ends_the_generation_where_calls_are_forced(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    generation, _ = _prepare(byte_level_tokenizer)
    assert generation.params.create_end is None
    options = ServerOptions(tool_call_parser="hermes", reasoning_parser="none")
    generation, _ = _prepare(byte_level_tokenizer, options, tool_choice="required")
    assert generation.params.create_end is not None
    is_end = generation.params.create_end()
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>\n'
    assert not any(map(is_end, call))
    assert any(map(is_end, call + call[:50]))


def test_markers_stay_in_the_text_that_is_parsed(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    generation, _ = _prepare(byte_level_tokenizer)
    kept = generation.params.params.kept_special_tokens
    assert kept is not None
    assert {"<|tool_call_end|>", "</think>"} <= set(kept)
    generation, _ = _prepare(byte_level_tokenizer, tool_choice="none")
    assert generation.params.params.kept_special_tokens == ["<think>", "</think>"]
    generation, _ = _prepare(byte_level_tokenizer, ServerOptions(), tool_choice="none")
    assert generation.params.params.kept_special_tokens is None


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "none", "parallel_tool_calls": False}, False),
        ({"tools": None, "parallel_tool_calls": False}, False),
        ({"parallel_tool_calls": False}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "write-file"}}}, True),
    ],
)
def test_choices_become_grammars(
    byte_level_tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any], constrained: bool
) -> None:
    generation, _ = _prepare(byte_level_tokenizer, **fields)
    grammar = generation.params.params.structured_output
    assert (grammar is not None) is constrained
    if grammar is not None and "tool_choice" in fields:
        assert "</think>" in grammar.value  # the prompt opened reasoning, which stays free


@pytest.mark.parametrize(
    ("options", "fields", "param"),
    [
        (OPTIONS, {"tools": None, "tool_choice": "required"}, "tool_choice"),
        (
            OPTIONS,
            {"tool_choice": {"type": "function", "function": {"name": "nosuch"}}},
            "tool_choice",
        ),
        (ServerOptions(tool_call_parser="none"), {}, "tool_choice"),
        (
            ServerOptions(enable_auto_tool_choice=False, tool_call_parser="hermes"),
            {},
            "tool_choice",
        ),
        (OPTIONS, {"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_impossible_choices_are_refused(
    byte_level_tokenizer: PreTrainedTokenizerFast,
    options: ServerOptions,
    fields: dict[str, Any],
    param: str,
) -> None:
    with pytest.raises(ApiError) as caught:
        _prepare(byte_level_tokenizer, options, **fields)
    assert caught.value.status == 400
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "functoin", "function": {"name": "f"}}]},
        {"tool_choice": "sometimes"},
        {"tool_choice": {"type": "function", "function": {}}},
        {"parallel_tool_calls": "yes"},
        {"reasoning_effort": "extreme"},
    ],
)
def test_wrong_shapes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate({"messages": USER, **fields})


def test_flags_are_checked() -> None:
    for options, message in (
        ({"tool_call_parser": "nosuch"}, "--tool-call-parser must be one of .*kimi_k2"),
        ({"reasoning_parser": "nosuch"}, "--reasoning-parser must be one of .*qwen3"),
        ({"reasoning_parser": "auto-"}, "must be one of auto, none, "),
    ):
        with pytest.raises(OptionError, match=message):
            ServerOptions(**options)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "write-file"}}]
)
def test_forced_calls_need_no_format(
    byte_level_tokenizer: PreTrainedTokenizerFast, choice: Any
) -> None:
    options = ServerOptions(tool_call_parser="none", reasoning_parser="none")
    generation, choices = _prepare(byte_level_tokenizer, options, tool_choice=choice)
    grammar = generation.params.params.structured_output
    assert grammar is not None
    assert "write-file" in grammar.value
    assert ("get_weather" in grammar.value) is (choice == "required")
    text = '{"name": "write-file", "parameters": {"a": 1}}'
    answer = _answer(generation, choices, text, "stop")
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "write-file", "arguments": '{"a": 1}'}


def test_under_required_a_repeated_call_ends_the_turn(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = SECTION.replace("<|tool_calls_section_end|>", "") + SECTION
    for choice, count in (("required", 1), ("auto", 2)):
        generation, choices = _prepare(byte_level_tokenizer, tool_choice=choice)
        message = _answer(generation, choices, text, "stop")["message"]
        assert len(message["tool_calls"]) == count


def test_the_page_about_formats_shows_one_that_works() -> None:
    from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
    from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS, deepseek_v31

    page = (Path(__file__).parents[3] / "docs" / "parsers.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    source = Path(deepseek_v31.__file__).read_text(encoding="utf-8")
    assert source.endswith(code.partition("\nCALL_BEGIN")[2])
    for name in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert f"`{name}`" in page


def test_a_grammar_that_is_too_large_names_the_option(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    options = dataclasses.replace(OPTIONS, max_tool_grammar=100)
    with pytest.raises(ApiError, match=r"takes 100; .*--max-tool-grammar") as error:
        _prepare(byte_level_tokenizer, options, tool_choice="required")
    assert error.value.param == "tools"
