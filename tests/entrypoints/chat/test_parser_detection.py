"""Formats of calls and reasoning are found from what chat templates hold."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.detection import (
    REASONING_ARCHITECTURES,
    REASONING_RULES,
    TOOL_ARCHITECTURES,
    TOOL_RULES,
    find_reasoning_parser,
    find_tool_parser,
    with_found_parsers,
)
from atom.entrypoints.chat.protocol import ChatCompletionRequest
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.entrypoints.parsing.tool_prompt import spell_calls
from atom.entrypoints.server_options import ServerOptions

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What is said of tools and reasoning in each family's template.
FRAGMENTS: dict[str, tuple[str, str | None, str | None]] = {
    "hermes": (
        "{% if tools %}<|im_start|>system\n<tools>{{ tools }}</tools>For each function call return "
        'a json object within <tool_call></tool_call> tags:\n<tool_call>\n{"name": <name>, '
        '"arguments": <args-dict>}\n</tool_call>{% endif %}',
        "hermes",
        None,
    ),
    "qwen3": (
        '{%- if tools %}<tools></tools>\n<tool_call>\n{"name": <function-name>}\n</tool_call>'
        "{%- endif %}{%- set content = message.content.split('</think>')[-1] %}"
        "{%- if enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}",
        "hermes",
        "think_tags",
    ),
    "qwen3_coder": (
        "{%- if tools %}<tools></tools>\n<tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>{%endif%}",
        "qwen3_coder",
        None,
    ),
    "kimi_k2": (
        "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>"
        "{%- endif %}<|tool_calls_section_begin|>{% for c in message.tool_calls %}"
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments }}"
        "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
        "kimi_k2",
        None,
    ),
    "kimi_k2_7_code": (
        "{%- if tools_ts_str -%}{{ tools_ts_str }}{%- endif -%}<|tool_calls_section_begin|>"
        "{{ tool_call['id'] }}<|tool_call_argument_begin|><think>{{ rc }}</think>",
        "kimi_k2",
        "think_tags",
    ),
    "kimi_k3": (
        "{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}{{- open_tag('argument', [('key', key)]) -}}"
        "{{- open_tag('think' if thinking else 'response') -}}{{ message_type }}",
        "kimi_k3",
        "kimi_k3",
    ),
    "kimi_k2_thinking": (
        "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>"
        "{%- if add_generation_prompt -%}<think>{%- if thinking is false -%}</think>{%- endif -%}",
        "kimi_k2",
        "think_tags",
    ),
    "deepseek_v3": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
        "tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments']}}",
        "deepseek_v3",
        None,
    ),
    "deepseek_r1": (
        "{{'<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n'}}{{'<｜Assistant｜><think>\\n'}}",
        "deepseek_v3",
        "think_tags",
    ),
    "deepseek_v31": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + "
        "'<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}{{'</think>'}}",
        "deepseek_v31",
        "think_tags",
    ),
    "llama3_json": (
        "<|start_header_id|>system<|end_header_id|>\n\n{{- 'Respond in the format "
        '{"name": function name, "parameters": dictionary of argument names}.\' }}{{ tools }}',
        "llama3_json",
        None,
    ),
    "mistral": (
        "[AVAILABLE_TOOLS] {{ tools }}[/AVAILABLE_TOOLS]{{- '[TOOL_CALLS] [' }}"
        "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}",
        "mistral",
        None,
    ),
    "mistral_named": (
        "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{{- '[TOOL_CALLS]' + name + '[ARGS]' + "
        "arguments }}",
        "mistral_named",
        None,
    ),
    "magistral": (
        "[THINK]Thoughts[/THINK][TOOL_CALLS]{{ name }}[ARGS]",
        "mistral_named",
        "mistral",
    ),
    "glm45": (
        "[gMASK]<sop><tools>{{ tools }}</tools><tool_call>{function-name}\n<arg_key>{arg-key-1}"
        "</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call><think></think>",
        "glm45",
        "think_tags",
    ),
    "gpt_oss": (
        "# Valid channels: analysis, commentary, final.{{ '<|start|>assistant to=' }}"
        "{{- 'functions.' + tool_call.name + '<|channel|>commentary ' }}json<|message|>",
        "gpt_oss",
        "gpt_oss",
    ),
    "llama4": (
        "<|header_start|>system<|header_end|>{{ tools }} in the format <|python_start|>"
        "[func_name1(params_name1=params_value1)]<|python_end|>",
        "pythonic",
        None,
    ),
    "llama32_pythonic": (
        "<|start_header_id|>{{ tools }} you MUST put it in the format of "
        '[func_name1(params_name1=params_value1)] "parameters"',
        "pythonic",
        None,
    ),
    "olmo3": (
        "<|im_start|>system <functions>{{ tools }}</functions><function_calls>{{ m.tool_calls }}"
        "</function_calls>",
        "pythonic",
        None,
    ),
    "granite32": (
        "<|start_of_role|>{{ tools }}Write your thoughts after 'Here is my thought process:' "
        "and then write 'Here is my response:'",
        None,
        "granite",
    ),
    "granite33": ("<think></think><response></response>{{ tools }}", None, "granite_tags"),
    "glm47": (
        "[gMASK]<sop>{{ tools }}<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>"
        "{arg-value-1}</arg_value>...</tool_call>{{ '</think>' if not enable_thinking }}",
        "glm47",
        "think_tags",
    ),
    "minimax_m2": (
        "]~b]ai\n<think>\n</think>{{ tools }}<minimax:tool_call>\n"
        '<invoke name="tool-name-1">\n</invoke></minimax:tool_call><response>{{ m }}</response>',
        "minimax_m2",
        "minimax_m2",
    ),
    "minimax_m3": ("<mm:think></mm:think>{{ tools }}", None, "minimax_m3"),
    "smollm2": (CHATML, "hermes", None),
    "unknown tools": ("<|im_start|>{{ tools }}<call>", None, None),
    "plain": ("[INST] {{ message.content }} [/INST]", None, None),
}


@pytest.mark.parametrize("family", FRAGMENTS)
def test_templates(family: str) -> None:
    template, tool_format, reasoning_format = FRAGMENTS[family]
    assert find_tool_parser(template, "llama").name == tool_format
    assert find_reasoning_parser(template, "llama").name == reasoning_format


def test_every_name_that_can_be_found_is_one() -> None:
    assert {rule.name for rule in TOOL_RULES} <= TOOL_PARSERS.keys()
    assert set(TOOL_ARCHITECTURES.values()) <= TOOL_PARSERS.keys()
    assert {rule.name for rule in REASONING_RULES} <= REASONING_PARSERS.keys()
    assert set(REASONING_ARCHITECTURES.values()) <= REASONING_PARSERS.keys()


def test_the_architecture_decides_where_the_template_does_not() -> None:
    assert find_tool_parser(None, "kimi_k25").name == "kimi_k2"
    assert find_tool_parser(None, "kimi_k3").name == "kimi_k3"
    assert find_reasoning_parser(None, "kimi_k3").name == "kimi_k3"
    assert find_tool_parser("{{ tools }}", "qwen3").name == "hermes"
    assert find_tool_parser(FRAGMENTS["qwen3_coder"][0], "qwen3").name == "qwen3_coder"
    assert find_tool_parser(None, "llama").name is None
    assert find_reasoning_parser(None, "step3_text").name == "step3"


def test_the_log_says_what_was_found_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        options = with_found_parsers(ServerOptions(), FRAGMENTS["qwen3"][0], "qwen3")
    assert (options.tool_format, options.reasoning_format) == ("hermes", "think_tags")
    assert "--tool-call-parser hermes: the chat template holds <tool_call>" in caplog.text
    assert "--reasoning-parser think_tags: the chat template holds </think>" in caplog.text
    caplog.clear()
    given = ServerOptions(tool_call_parser="none", reasoning_parser="granite")
    with caplog.at_level(logging.INFO):
        options = with_found_parsers(given, FRAGMENTS["qwen3"][0], "qwen3")
    assert (options.tool_format, options.reasoning_format) == (None, "granite")
    assert "--tool-call-parser none, as given" in caplog.text
    found = with_found_parsers(ServerOptions(), None, "llama")
    assert (found.tool_format, found.reasoning_format) == (None, None)


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
HISTORY: list[Any] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "北京"}'},
            }
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
]


def _prompt(tokenizer: Any, template: str, messages: list[Any], tool_format: str) -> str:
    body = ChatCompletionRequest.model_validate({"messages": messages, "tools": [TOOL]})
    encoder = PromptEncoder(tokenizer, 4000, template, tool_format=tool_format)
    text = encoder.encode_chat(body, add_special_tokens=False).text
    assert text is not None
    return text


def test_templates_without_tools_are_told_of_them(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = _prompt(byte_level_tokenizer, CHATML, HISTORY, "hermes")
    assert prompt.startswith("<|im_start|>system\nYou can call these functions:\n<tools>\n{")
    assert '"name": "get_weather"' in prompt
    assert '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n' in prompt
    assert 'Wait.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京"}}' in prompt
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in prompt
    system = [{"role": "system", "content": "Be brief."}, *HISTORY]
    prompt = _prompt(byte_level_tokenizer, CHATML, system, "llama3_json")
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    assert '{"name": "function_name", "parameters": {"argument": "value"}}\n' in prompt


def test_templates_that_know_tools_are_left_alone(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = "{{ tools }}|{% for m in messages %}{{ m.role }}{{ m.tool_calls }}{% endfor %}"
    prompt = _prompt(byte_level_tokenizer, template, HISTORY, "hermes")
    assert prompt.startswith("[{'type': 'function'")
    assert "|user" in prompt
    assert "You can call" not in prompt
    assert "<tool_call>" not in prompt


@pytest.mark.parametrize("name", [n for n, f in TOOL_PARSERS.items() if f.grammar.takes_json])
def test_calls_that_are_spelled_are_read(name: str) -> None:
    from parser_texts import create_parser

    calls = [("f", '{"a": 1}'), ("g", "{}")][: TOOL_PARSERS[name].grammar.max_calls]
    message = create_parser(name).parse_complete(spell_calls(calls, name), "stop")
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == calls
