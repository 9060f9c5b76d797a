"""What templates write of a call in the history is found, read back, and what grammars force."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_templates import TEMPLATES
from test_tool_grammar import TAGS, Bench
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.detection import find_reasoning_parser, find_tool_parser
from atom.entrypoints.chat.template import ChatTemplate
from atom.entrypoints.parsing.deltas import ParsedMessage
from atom.entrypoints.parsing.output_parser import ChatOutputParser
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.tool_grammar import tool_call_grammar

FOUND = {
    "qwen3_coder_first": ("qwen3_coder", None),
    "qwen3_coder": ("qwen3_coder", None),
    "qwen3_5": ("qwen3_coder", "think_tags"),
    "glm45": ("glm45", "think_tags"),
    "glm47": ("glm47", "think_tags"),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "gpt_oss": ("gpt_oss", "gpt_oss"),
    "kimi_k2": ("kimi_k2", "think_tags"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
}
PROPERTIES = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "z": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "l": {"type": "array"},
    "o": {"$ref": "#/$defs/O"},
    "e": {"enum": ["x", 5, None]},
    "anything": {},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"O": {"type": "object"}}}
NAMES = ("get_it", "g-2.x")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"s": ""},
    {"s": "two\nlines\n"},
    {"s": '\n say "it", isn\'t it? \\n {x: [1]} 日本 😀 <b>&amp;</b>\t'},
    {"s": "5"},
    {"s": "null", "z": "x"},
    {"i": 5, "n": -1.5, "b": True, "z": None},
    {"n": 2, "b": False, "e": "x"},
    {"l": [1, "a", None, {"k": [True]}], "o": {"a": {"b": "c\nd"}, "é": "'q'"}, "e": 5},
    {"l": [], "o": {}, "e": None},
    {"anything": {"deep": [1]}},
    {"anything": "words"},
]
LOOK_ALIKES: list[dict[str, Any]] = [
    {"s": "</parameter> x"},
    {"s": "a</arg_value>b"},
    {"s": "<tool_call>\n</tool_call> y"},
    {"s": "</invoke> </function> z"},
    {"s": "<|tool_call_begin|> <minimax:tool_call> <|message|>"},
    {"s": "<|close|>argument<|sep|> <|open|>x<|sep|>"},
]
CALLS = [*([one] for one in (*ARGUMENTS, *LOOK_ALIKES)), ARGUMENTS[5:8], [{}, {}, ARGUMENTS[3]]]


def _answer(tokenizer: Any, name: str, calls: list[Any], content: str) -> tuple[str, str]:
    """A prompt, and the answer that the template writes of a message with these calls."""
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": "thought",
        "tool_calls": [
            {
                "id": f"functions.{NAMES[i % 2]}:{i}",
                "type": "function",
                "function": {"name": NAMES[i % 2], "arguments": json.dumps(arguments)},
            }
            for i, arguments in enumerate(calls)
        ],
    }
    template = ChatTemplate(tokenizer, TEMPLATES[name])
    question = [{"role": "user", "content": "hi"}]
    prompt = template.render(question, TOOLS, {"add_generation_prompt": True})
    whole = template.render([*question, message], TOOLS)
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :]


def _parser(name: str, prompt: str) -> ChatOutputParser:
    tool_format, reasoning = FOUND[name]
    ends = reasoning and REASONING_PARSERS[reasoning].end_after(prompt)
    return ChatOutputParser(tool_format, reasoning, TOOLS, ends is not None)


def _check(message: ParsedMessage, calls: list[Any]) -> None:
    found = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]
    assert found == [(NAMES[i % 2], arguments) for i, arguments in enumerate(calls)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_found(name: str) -> None:
    template = TEMPLATES[name]
    found = find_tool_parser(template, "x").name, find_reasoning_parser(template, "x").name
    assert found == FOUND[name]


@pytest.mark.parametrize("content", ["", "Let me see."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_of_the_history_are_read_back(
    byte_level_tokenizer: PreTrainedTokenizerFast, name: str, content: str
) -> None:
    for calls in CALLS:
        if name == "qwen3_coder_first" and "o" in calls[0]:
            continue  # Python's spelling of a string with a quote in it
        prompt, text = _answer(byte_level_tokenizer, name, calls, content)
        message = _parser(name, prompt).parse_complete(text, "stop")
        _check(message, calls)
        told = message.reasoning_content if name == "gpt_oss" else message.content
        assert content in (told or "")


@pytest.fixture(scope="module")
def bench(byte_level_tokenizer: PreTrainedTokenizerFast) -> Bench:
    backend = type(byte_level_tokenizer.backend_tokenizer).from_str(
        byte_level_tokenizer.backend_tokenizer.to_str()
    )
    backend.add_tokens([AddedToken(tag) for tag in TAGS])
    copy = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    return Bench(copy, True)


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "qwen3_coder_first"])
def test_grammars_write_what_templates_write(
    byte_level_tokenizer: PreTrainedTokenizerFast, bench: Bench, name: str
) -> None:
    """Token by token: where the vocabulary has a tag as a token, it is that token."""
    tool_format, _ = FOUND[name]
    wanted = tool_call_grammar(tool_format, TOOLS, "required")
    for arguments in ARGUMENTS:
        if name in ("qwen3_coder", "qwen3_5") and {"b", "z", "e"} & arguments.keys():
            continue  # True and None, which are read, but not forced
        _, text = _answer(byte_level_tokenizer, name, [arguments], "")
        thoughts = "<|close|>think<|sep|>" if name == "kimi_k3" else "</think>"
        text = text.partition(thoughts)[2] if thoughts in text else text
        text = text.lstrip("\n").removesuffix("<|call|>")
        assert bench.takes(wanted, text), text


SPELLED = {
    "glm45": "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value></tool_call>",
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_grammar_does_not_mix_the_forms(bench: Bench, name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    for other, text in SPELLED.items():
        wanted = tool_call_grammar(name, tools, "required")
        assert bench.takes(wanted, text) == (other == name)


def _call_text(tool_format: str, key: str, value: str) -> str:
    pair = {
        "glm45": f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        "glm47": f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        "minimax_m2": f'\n<parameter name="{key}">{value}</parameter>\n',
        "qwen3_coder": f"\n<parameter={key}>\n{value}\n</parameter>\n",
    }[tool_format]
    if tool_format == "minimax_m2":
        return f'<minimax:tool_call>\n<invoke name="f">{pair}</invoke>\n</minimax:tool_call>'
    if tool_format == "qwen3_coder":
        return f"<tool_call>\n<function=f>{pair}</function>\n</tool_call>"
    return f"<tool_call>f{pair}</tool_call>"


# Of `key`, a value that is allowed, and one that is not.
STRICT: list[tuple[Any, str, str | None]] = [
    ({"type": "string", "minLength": 2}, "ab", "a"),
    ({"type": "string", "minLength": 1}, "<html>\n", ""),
    ({"type": "string", "maxLength": 2}, "ab", "abc"),
    ({"type": "string", "pattern": "^[ab]+$"}, "abab", "abc"),
    ({"enum": ["x y", 5]}, "x y", "y"),
    ({"enum": ["x y", 5]}, "5", "6"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "x"),
    ({"$ref": "#/$defs/D"}, "[1, 2]", '["a"]'),
    ({"type": "string"}, "<b>\n{", None),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), STRICT)
@pytest.mark.parametrize("tool_format", ["glm45", "glm47", "minimax_m2", "qwen3_coder"])
def test_strict_values(
    bench: Bench, tool_format: str, schema: Any, right: str, wrong: str | None
) -> None:
    definitions = {"D": {"type": "array", "items": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"key": schema}, "$defs": definitions}
    strict = {"name": "f", "parameters": parameters | {"required": ["key"]}, "strict": True}
    tools = [{"type": "function", "function": strict}]
    wanted = tool_call_grammar(tool_format, tools, "required")
    assert bench.takes(wanted, _call_text(tool_format, "key", right))
    assert not bench.takes(wanted, _call_text(tool_format, "other", right))
    if wrong is not None:
        assert not bench.takes(wanted, _call_text(tool_format, "key", wrong))
    begun = _call_text(tool_format, "key", right).partition(right)[0] + right
    assert bench.takes(wanted, begun, ends=False)
    assert not bench.takes(wanted, begun)  # a value does not end an answer


@pytest.mark.parametrize("tool_format", ["glm45", "glm47", "minimax_m2", "qwen3_coder"])
def test_tools_without_a_schema_take_any_parameters(bench: Bench, tool_format: str) -> None:
    wanted = tool_call_grammar(
        tool_format, [{"type": "function", "function": {"name": "f"}}], "required"
    )
    for key, value in (("any", "words"), ("k-2", '{"a": [1]}'), ("日本", "")):
        assert bench.takes(wanted, _call_text(tool_format, key, value))
