"""Chats of models that come without a template, as their own code renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2 import TemplateError
from models.kimi_k3 import write_kimi_k3
from transformers import PreTrainedTokenizerFast

from atom.config import ModelOptions
from atom.entrypoints.chat.template import find_needs
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.chat_template import render_chat_template
from atom.model_loader.tokenizers.default_templates import DEFAULT_TEMPLATES
from atom.model_loader.tokenizers.tokenizer import load_text_tokenizer

KIMI_K3 = DEFAULT_TEMPLATES["kimi_k3"]
END = "<|close|>message<|sep|><|end_of_msg|>"
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how '
    "much to think in your thinking channel (not including the response channel), supported values "
    "include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
    f"`thinking_effort=max`.{END}"
)
HELLO = {"role": "user", "content": "Hello!"}
ASKED = f'<|open|>message role="user"<|sep|>Hello!{END}'
THOUGHTS = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
TEXT = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'


def render(*messages: dict[str, Any], **variables: Any) -> str:
    return render_chat_template(KIMI_K3, messages, **variables)


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


def test_a_question() -> None:
    assert render(HELLO, add_generation_prompt=True) == EFFORT + ASKED + THOUGHTS
    named = {"role": "system", "name": 'a "b" & c', "content": "Be brief."}
    said = '<|open|>message role="system" name="a &quot;b&quot; &amp; c"<|sep|>Be brief.'
    assert render(named, HELLO) == EFFORT + said + END + ASKED


@pytest.mark.parametrize(
    ("variables", "effort"),
    [
        ({"thinking_effort": "low"}, "low"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "medium"}, "max"),
        ({"thinking_effort": "low", "reasoning_effort": "high"}, "low"),
    ],
)
def test_how_much_to_think(variables: dict[str, str], effort: str) -> None:
    expected = EFFORT.replace("thinking_effort=max", f"thinking_effort={effort}") + ASKED
    assert render(HELLO, **variables) == expected


@pytest.mark.parametrize(
    "off", [{"thinking": False}, {"enable_thinking": False}, {"reasoning_effort": "none"}]
)
def test_without_thoughts(off: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."}
    said = f"{TEXT}Hi.<|close|>response<|sep|>{END}"
    assert render(HELLO, answer, add_generation_prompt=True, **off) == ASKED + said + TEXT


def test_an_effort_that_there_is_not() -> None:
    with pytest.raises(TemplateError, match="thinking_effort is medium"):
        render(HELLO, thinking_effort="medium")


def test_thoughts_of_the_history_stay() -> None:
    answers = (
        {"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."},
        {"role": "assistant", "content": None},
    )
    expected = "".join(
        f"{THOUGHTS}{thought}<|close|>think<|sep|><|open|>response<|sep|>{text}"
        f"<|close|>response<|sep|>{END}"
        for thought, text in (("Greet.", "Hi."), ("", ""))
    )
    assert render(*answers) == EFFORT + expected


def test_tools_calls_and_results() -> None:
    """Results are told in the order of the calls."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather, lookup.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    arguments = {"city": "Zürich", "days": 3, "exact": True, "at": None, "of": [1, {"a": 2}]}
    answer = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Two.",
        "tool_calls": [call("get_weather", arguments), call("get_time", "{broken", 1)],
    }
    results = (
        {"role": "tool", "tool_call_id": "functions.get_time:1", "content": "noon"},
        {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "22C"},
    )
    declared = (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n```json\n"
        f"{json.dumps([tool], sort_keys=True, separators=(',', ':'))}\n```{END}"
    )
    written = {
        "city": ("string", "Zürich"),
        "days": ("number", "3"),
        "exact": ("boolean", "true"),
        "at": ("null", "null"),
        "of": ("array", '[1, {"a": 2}]'),
    }
    given = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, (kind, value) in written.items()
    )
    calls = (
        f'<|open|>call tool="get_weather" index="1"<|sep|>{given}<|close|>call<|sep|>'
        '<|open|>call tool="get_time" index="2"<|sep|><|open|>json type="object"<|sep|>{broken'
        "<|close|>json<|sep|><|close|>call<|sep|>"
    )
    said = (
        f"{THOUGHTS}Two.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
        f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>{END}"
    )
    told = "".join(
        f'<|open|>message role="tool" tool="{name}" index="{i}"<|sep|>{text}{END}'
        for i, (name, text) in enumerate((("get_weather", "22C"), ("get_time", "noon")), start=1)
    )
    found = render(HELLO, answer, *results, tools=[tool], add_generation_prompt=True)
    assert found == declared + EFFORT + ASKED + said + told + THOUGHTS
    by_place = [{k: v for k, v in r.items() if k != "tool_call_id"} for r in reversed(results)]
    assert told in render(HELLO, answer, *by_place)
    with pytest.raises(TemplateError, match="more results of tools than calls"):
        render(HELLO, answer, *results, *results)


def test_what_is_asked_of_the_answer_stands_last() -> None:
    for choice, text in (
        ("required", "You MUST call tools in the next message."),
        ("none", "You MUST NOT call any tools in the next message."),
    ):
        found = render(HELLO, add_generation_prompt=True, tool_choice=choice)
        assert found.startswith(EFFORT + ASKED)
        assert found.endswith(f"`tool_choice={choice}`.\n{text}{END}{THOUGHTS}")
    assert render(HELLO, tool_choice="auto") == EFFORT + ASKED


def test_arguments_of_calls_are_given_as_objects() -> None:
    needs = find_needs(lambda messages, **kw: render_chat_template(KIMI_K3, messages, **kw))
    assert not needs.text_arguments
    assert not needs.no_calls
    assert not needs.no_tools
    assert not needs.one_call
    assert not needs.parts


def test_a_checkpoint_without_a_template(
    tmp_path: Any, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    write_kimi_k3(tmp_path, vocab_size=len(byte_level_tokenizer))
    byte_level_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    options = ModelOptions(str(tmp_path))
    assert load_text_tokenizer(resolve_model(options), options).chat_template == KIMI_K3
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    own = load_text_tokenizer(resolve_model(options), options).chat_template
    assert own == "{{ messages[0].content }}"
