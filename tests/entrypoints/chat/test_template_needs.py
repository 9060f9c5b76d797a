"""Templates that write one call of a message, or refuse what others take."""

from __future__ import annotations

from typing import Any

import pytest
from call_templates import TEMPLATES
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.template import ChatTemplate, one_call_each

# As Llama 3.1's: several calls are refused.
REFUSES_SEVERAL = (
    "{%- for m in messages -%}{%- if m.tool_calls -%}{%- if m.tool_calls | length != 1 -%}"
    "{{- raise_exception('single calls only') -}}{%- endif -%}"
    "{%- set f = m.tool_calls[0].function -%}{{- '[call]' ~ f.name ~ (f.arguments | tojson) -}}"
    "{%- else -%}{{- '[' ~ m.role ~ ']' ~ m.content -}}{%- endif -%}{%- endfor -%}"
)
# As Qwen3-Coder's: a tool without parameters is an error.
READS_PARAMETERS = (
    "{%- for tool in tools or [] -%}{{- tool.function.name -}}"
    "{%- for name, schema in tool.function.parameters.properties | items -%}{{- name -}}"
    "{%- endfor -%}{%- endfor -%}{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
)


def _call(name: str, number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": f'{{"n": {number}}}'}
    return {"id": f"c{number}", "type": "function", "function": function}


def _result(number: int | None, content: str) -> dict[str, Any]:
    told = {"role": "tool", "content": content}
    return told if number is None else told | {"tool_call_id": f"c{number}"}


def _turn(*results: dict[str, Any], content: str = "", **more: Any) -> list[dict[str, Any]]:
    calls = [_call("f", 1), _call("g", 2)]
    answer = {"role": "assistant", "content": content, "tool_calls": calls, **more}
    return [{"role": "user", "content": "hi"}, answer, *results]


def test_each_call_has_a_message_before_its_results() -> None:
    turn = _turn(_result(2, "two"), _result(1, "one"), content="Wait.", reasoning_content="so")
    after = {"role": "user", "content": "and?"}
    user, first, one, second, two, last = one_call_each([*turn, after])
    assert (user, one, two, last) == (turn[0], _result(1, "one"), _result(2, "two"), after)
    assert first == {**turn[1], "tool_calls": [_call("f", 1)]}
    assert second == {"role": "assistant", "content": "", "tool_calls": [_call("g", 2)]}


@pytest.mark.parametrize(
    ("results", "order"),
    [
        ([_result(None, "one"), _result(None, "two")], "f one g two"),
        ([_result(7, "one"), _result(1, "first")], "f one first g"),
        ([_result(2, "two")], "f g two"),
        ([_result(None, "one"), _result(None, "two"), _result(None, "three")], "f one g two three"),
        ([], "f g"),
    ],
)
def test_results_that_name_no_call_go_by_place(results: list[Any], order: str) -> None:
    divided = one_call_each(_turn(*results))[1:]
    told = [
        m["tool_calls"][0]["function"]["name"] if "tool_calls" in m else m["content"]
        for m in divided
    ]
    assert " ".join(told) == order


def test_turns_with_one_call_or_none_stay() -> None:
    single = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [_call("f", 1)]},
        _result(1, "one"),
        {"role": "assistant", "content": "done"},
    ]
    assert one_call_each(single) == single


def test_several_calls_of_a_turn_reach_templates_that_write_one(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    turn = _turn(_result(2, "two"), _result(1, "one"))
    text = ChatTemplate(byte_level_tokenizer, REFUSES_SEVERAL).render(turn, None)
    assert text == '[user]hi[call]f{"n": 1}[tool]one[call]g{"n": 2}[tool]two'
    text = ChatTemplate(byte_level_tokenizer, TEMPLATES["gpt_oss"]).render(turn, None)
    assert text.index("functions.f") < text.index("[tool]one") < text.index("functions.g")
    assert text.endswith("[tool]two\n")


def test_text_beside_thoughts_is_no_error(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    turn = _turn(content="Wait.", reasoning_content="I should look.")
    text = ChatTemplate(byte_level_tokenizer, TEMPLATES["gpt_oss"]).render(turn, None)
    assert "analysis<|message|>I should look.\n\nWait.<|end|>" in text


@pytest.mark.parametrize("template", [READS_PARAMETERS, TEMPLATES["gpt_oss"]])
def test_tools_need_no_description_and_no_parameters(
    byte_level_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    bare = {"type": "function", "function": {"name": "bare_tool"}}
    messages = [{"role": "user", "content": "hi"}]
    assert "bare_tool" in ChatTemplate(byte_level_tokenizer, template).render(messages, [bare])
