"""Grammars of tool calls take what the models write, and only what the parsers can read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from atom import StructuredOutput
from atom.entrypoints.parsing.calls.call_grammar import MAX_CALLS
from atom.entrypoints.parsing.output_parser import ChatOutputParser
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.tool_grammar import (
    answer_or_calls,
    tool_call_grammar,
)
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.structured_output.state import is_allowed
from atom.structured_output.vocabulary import read_vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend


def tool(name: str, *, strict: bool = True) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters, "strict": strict},
    }


TOOLS = [tool("get-weather"), tool("send.mail_2")]
GOOD = '{"city": "北京 \\"<x>\\" 😀", "days": 3}'


def call(parser: str, name: str, arguments: str, number: int = 0) -> str:
    """One call as the models write it."""
    return {
        "kimi_k2": f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|>",
        "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{arguments}\n```<｜tool▁call▁end｜>",
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "kimi_k3": f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        f"{_xtml(arguments)}<|close|>call<|sep|>",
        "llama3_json": f'{{"name": "{name}", "parameters": {arguments}}}',
        "deepseek_v31": f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "glm45": f"<tool_call>{name}\n{_tagged(arguments, GLM)}\n</tool_call>",
        "glm47": f"<tool_call>{name}{_tagged(arguments, GLM, '').replace(GAP, '><')}</tool_call>",
        "gpt_oss": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{arguments}",
        "minimax_m2": f'<invoke name="{name}">\n{_tagged(arguments, MINIMAX)}\n</invoke>\n',
        "mistral": f'{{"name": "{name}", "arguments": {arguments}}}',
        "mistral_named": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
        "pythonic": f"{name}({_tagged(arguments, '{}={}', ', ')})",
        "qwen3_coder": f"<tool_call>\n<function={name}>\n{_tagged(arguments, QWEN)}\n"
        "</function>\n</tool_call>",
    }[parser]


GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"
GAP = ">\n<"
MINIMAX = '<parameter name="{}">{}</parameter>'
QWEN = "<parameter={}>\n{}\n</parameter>"


def _tagged(arguments: str, form: str, separator: str = "\n") -> str:
    """Each argument in the form; strings as they are, or else in JSON."""
    try:
        pairs = json.loads(arguments)
    except ValueError:  # of tests with a call that is cut
        return arguments
    plain = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in pairs.items()
    }
    if form == "{}={}":
        plain = {key: json.dumps(value, ensure_ascii=False) for key, value in pairs.items()}
    return separator.join(form.format(key, value) for key, value in plain.items())


def _xtml(arguments: str) -> str:
    kinds = {str: "string", int: "number"}
    try:
        pairs = json.loads(arguments)
    except ValueError:
        return arguments
    return "".join(
        f'<|open|>argument key="{key}" type="{kinds.get(type(value))}"<|sep|>{value}'
        "<|close|>argument<|sep|>"
        for key, value in pairs.items()
    )


def answer(parser: str, *calls: str) -> str:
    grammar = TOOL_PARSERS[parser].grammar
    begin, end = AROUND.get(parser) or grammar.section or ("", "")
    return begin + grammar.separator.join(calls) + end


AROUND = {
    "kimi_k3": (
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
        "<|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    "minimax_m2": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    "mistral": ("[TOOL_CALLS][", "]"),
    "pythonic": ("[", "]"),
}
# Formats in which any text is a string.
TAGGED = ("glm45", "glm47", "minimax_m2", "qwen3_coder")
# Of which vocabularies have tokens, though they are no markers.
TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class Bench:
    """Whole texts against grammars, with markers as tokens or spelled out."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, with_markers: bool) -> None:
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>"
        )
        if with_markers:
            formats = TOOL_PARSERS.values()
            markers = {m for f in formats for m in f.special_tokens or f.markers}
            markers |= {"</think>", *TAGS}
            self.tokenizer.add_tokens([AddedToken(m, special=True) for m in sorted(markers)])
        self.eos = self.tokenizer.eos_token_id
        self.backend = XGrammarBackend(
            read_vocabulary(self.tokenizer, len(self.tokenizer), [self.eos])
        )

    def takes(self, wanted: StructuredOutput | None, text: str, *, ends: bool = True) -> bool:
        """Whether the text can be written, and the answer can end after it."""
        assert wanted is not None
        matcher = self.backend.compile(wanted).create_matcher()
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            if not matcher.accept(token_id):
                return False
        mask = np.full((1, -(-len(self.tokenizer) // 32)), -1, dtype=np.int32)
        matcher.fill(mask, 0)
        return is_allowed(mask, 0, self.eos) or not ends


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "spelled"])
def bench(request: pytest.FixtureRequest, byte_level_tokenizer: PreTrainedTokenizerFast) -> Bench:
    # A copy: tokens are added to the backend itself.
    backend = type(byte_level_tokenizer.backend_tokenizer).from_str(
        byte_level_tokenizer.backend_tokenizer.to_str()
    )
    copy = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    return Bench(copy, request.param)


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize("choice", ["required", "auto", "named"])
def test_calls_as_models_write_them(bench: Bench, parser: str, choice: str) -> None:
    chosen: Any = choice
    if choice == "named":
        chosen = {"type": "function", "function": {"name": "send.mail_2"}}
    wanted = tool_call_grammar(parser, TOOLS, chosen)
    first, second = call(parser, "get-weather", GOOD), call(parser, "send.mail_2", GOOD, 12)
    assert bench.takes(wanted, answer(parser, second))
    assert bench.takes(wanted, answer(parser, first)) == (choice != "named")
    is_single = choice == "named" or TOOL_PARSERS[parser].grammar.max_calls == 1
    assert bench.takes(wanted, answer(parser, first, second)) != is_single
    head = "<|channel|>final<|message|>" if parser == "gpt_oss" else ""
    assert bench.takes(wanted, head + "Let me see. {") == (choice == "auto")
    assert not bench.takes(wanted, answer(parser, call(parser, "other", GOOD)))
    number = answer(parser, call(parser, "send.mail_2", '{"city": 1}'))
    assert bench.takes(wanted, number) == (parser in TAGGED)
    for wrong in ('{"town": "x"}', "{}", '{"city": "x"', "text"):
        assert not bench.takes(wanted, answer(parser, call(parser, "send.mail_2", wrong)))
    single = tool_call_grammar(parser, TOOLS, chosen, parallel_tool_calls=False)
    assert bench.takes(single, answer(parser, second))
    assert not bench.takes(single, answer(parser, first, second))


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_what_the_grammar_takes_the_parser_reads(bench: Bench, parser: str) -> None:
    wanted = tool_call_grammar(parser, TOOLS, "required")
    names = ["get-weather", "send.mail_2"][: TOOL_PARSERS[parser].grammar.max_calls]
    text = answer(parser, *(call(parser, name, GOOD, i) for i, name in enumerate(names)))
    assert bench.takes(wanted, text)
    message = ChatOutputParser(parser, None, TOOLS, False).parse_complete(text, "stop")
    assert [c.function.name for c in message.tool_calls] == names
    assert [json.loads(c.function.arguments) for c in message.tool_calls] == [
        json.loads(GOOD)
    ] * len(names)
    assert not message.content


@pytest.mark.parametrize("parser", ["kimi_k2", "deepseek_v3"])
def test_strings_hold_no_markers(bench: Bench, parser: str) -> None:
    """Neither a marker's token nor its spelling: the parsers would end the call there."""
    wanted = tool_call_grammar(parser, TOOLS, "required")
    begin = answer(parser, call(parser, "get-weather", '{"city": "@')).split("@")[0]
    assert bench.takes(wanted, begin + "<|tool <call>", ends=False)
    (forbidden,) = TOOL_PARSERS[parser].grammar.forbidden
    for marker in TOOL_PARSERS[parser].markers:
        if not marker.startswith(forbidden):
            continue
        assert not bench.takes(wanted, begin + marker, ends=False)
        assert not bench.takes(wanted, begin + marker[:-1] + "x", ends=False)


def test_free_text_of_auto_keeps_its_markers(bench: Bench) -> None:
    wanted = tool_call_grammar("kimi_k2", TOOLS, "auto")
    begin = "<|tool_calls_section_begin|>"
    assert bench.takes(wanted, "thinking...</think>\n\nDone <tool_call>.")
    assert bench.takes(wanted, f"Well. {begin}", ends=False)
    assert not bench.takes(wanted, f"Well. {begin} text", ends=False)
    assert not bench.takes(wanted, "Well. <|tool_call_begin|>", ends=False)


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_reasoning_comes_before_forced_calls(bench: Bench, parser: str) -> None:
    wanted = tool_call_grammar(parser, TOOLS, "required", starts_after="</think>")
    calls = answer(parser, call(parser, "get-weather", GOOD))
    assert bench.takes(wanted, f"Well, {{ 日本...</think>{calls}")
    assert not bench.takes(wanted, "Well, </think>Hello", ends=False)
    assert not bench.takes(wanted, "Well, ")
    for marker in TOOL_PARSERS[parser].opening:
        assert not bench.takes(wanted, f"Well, {marker}", ends=False)
    beside = answer_or_calls(
        StructuredOutput.choice(["yes"]), parser, TOOLS, starts_after="</think>"
    )
    assert bench.takes(beside, f"Well</think>{calls}")
    assert bench.takes(beside, "Well</think>yes")
    assert not bench.takes(beside, "yes")


def test_schemas_of_lax_tools_bind_where_a_call_is_forced(bench: Bench) -> None:
    lax = [tool("get-weather", strict=False)]
    odd = [tool("get-weather", strict=False)]
    odd[0]["function"]["parameters"] = {"type": "object", "not": {"required": ["x"]}}
    other = answer("hermes", call("hermes", "get-weather", '{"other": [1]}'))
    assert tool_call_grammar("hermes", lax, "auto") is None
    assert not bench.takes(tool_call_grammar("hermes", lax, "required"), other)
    assert bench.takes(tool_call_grammar("hermes", odd, "required"), other)
    assert bench.takes(tool_call_grammar("hermes", [*lax, TOOLS[1]], "auto"), other)
    del lax[0]["function"]["parameters"]
    assert bench.takes(tool_call_grammar("hermes", lax, "required"), other)


def test_an_answer_beside_tools(bench: Bench) -> None:
    wanted = answer_or_calls(StructuredOutput.choice(["yes", "no"]), "kimi_k2", TOOLS, True)
    assert bench.takes(wanted, "yes")
    assert bench.takes(wanted, answer("kimi_k2", call("kimi_k2", "get-weather", GOOD)))
    assert not bench.takes(wanted, "maybe")


def test_nothing_to_enforce() -> None:
    assert tool_call_grammar("kimi_k2", TOOLS, "none") is None
    assert tool_call_grammar("unheard-of", [tool("a", strict=False)], "auto") is None
    assert tool_call_grammar("kimi_k2", [], "auto") is None


def test_what_cannot_be_enforced() -> None:
    with pytest.raises(ValueError, match="'unheard-of' has no grammar; there are deepseek_v3"):
        tool_call_grammar("unheard-of", TOOLS, "required")
    with pytest.raises(ValueError, match="names 'x', which is not among"):
        tool_call_grammar("kimi_k2", TOOLS, {"type": "function", "function": {"name": "x"}})
    wrong = tool("a")
    wrong["function"]["parameters"]["not"] = {}
    with pytest.raises(ValueError, match=r"tools\[1\].function.parameters: .*'not'"):
        tool_call_grammar("kimi_k2", [TOOLS[0], wrong], "auto")


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_forced_calls_are_bounded(bench: Bench, parser: str) -> None:
    wanted = tool_call_grammar(parser, TOOLS, "required")
    most = TOOL_PARSERS[parser].grammar.max_calls
    assert most <= MAX_CALLS
    calls = [call(parser, "get-weather", GOOD, i) for i in range(most + 1)]
    assert bench.takes(wanted, answer(parser, *calls[:most]))
    assert not bench.takes(wanted, answer(parser, *calls))


@pytest.mark.parametrize("parser", [name for name in TOOL_PARSERS if name not in AROUND])
def test_white_space_in_arguments_is_bounded(bench: Bench, parser: str) -> None:
    if not TOOL_PARSERS[parser].grammar.takes_json:
        return
    for choice in ("required", "auto"):
        wanted = tool_call_grammar(parser, TOOLS, choice)
        for space, is_taken in (("", True), (" ", True), ("\n ", True), ("   ", False)):
            text = f'{{{space}"city":{space}"a   b"{space}}}'
            written = answer(parser, call(parser, "get-weather", text))
            assert bench.takes(wanted, written) is is_taken


def test_properties_in_python(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    for required, texts, wrong in (
        ([], ["f()", "f(a=1)", 'f(b="x")', 'f(a=1, b="x")'], ["f(1)", 'f(b="x", a=1)']),
        (["b"], ['f(b="x")', 'f(b="x", a=1)'], ["f()", "f(a=1)"]),
    ):
        function = {"name": "f", "parameters": {**schema, "required": required}, "strict": True}
        wanted = tool_call_grammar("pythonic", [{"function": function}], "named")
        assert all(bench.takes(wanted, f"[{text}]") for text in texts)
        assert not any(bench.takes(wanted, f"[{text}]") for text in wrong)
    wanted = tool_call_grammar("pythonic", [{"function": {"name": "f"}}], "named")
    assert bench.takes(wanted, '[f(**{"any": [1]})]')


def test_many_tools_compile_and_are_remembered(bench: Bench) -> None:
    """300 KB of them: descriptions are no part of a grammar, and the same set is built once."""
    described = {"type": "string", "description": "what this field of the call is for " * 4}
    fields = {f"field_{i}": {**described, "maxLength": 200} for i in range(16)}
    parameters = {"type": "object", "properties": fields, "required": ["field_0"]}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}}
        for i in range(100)
    ]
    wanted = tool_call_grammar("hermes", tools, "required")
    assert wanted is not None
    assert "description" not in wanted.value
    assert len(json.dumps(tools)) > 300_000 > len(wanted.value)
    assert tool_call_grammar("hermes", tools, "required") is wanted
    assert bench.takes(wanted, answer("hermes", call("hermes", "tool_99", '{"field_0": "a"}')))
    assert not bench.takes(wanted, answer("hermes", call("hermes", "tool_99", "{}")))


def test_a_tool_keeps_what_can_be_enforced_of_its_schema(bench: Bench) -> None:
    """One that is not strict; a strict one is refused."""
    loose = tool("f", strict=False)
    loose["function"]["parameters"]["not"] = {}
    loose["function"]["parameters"]["properties"]["days"] = {"type": "integer", "multipleOf": "x"}
    wanted = tool_call_grammar("hermes", [loose], "required")
    for arguments, is_valid in (
        ('{"city": "a", "days": 1}', True),
        ('{"city": 1}', False),
        ('{"days": 1}', False),
        ('{"city": "a", "days": ""}', False),
    ):
        text = answer("hermes", call("hermes", "f", arguments))
        assert bench.takes(wanted, text) == is_valid, arguments
    loose["function"]["strict"] = True
    with pytest.raises(ValueError, match="'not' is not supported"):
        tool_call_grammar("hermes", [loose], "required")


K3_THINK = "<|close|>think<|sep|>"
K3_RESPONSE = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")


def test_markers_of_several_tokens_end_reasoning(bench: Bench) -> None:
    """Kimi K3's are special tokens with text between them."""
    calls = answer("kimi_k3", call("kimi_k3", "get-weather", GOOD, 1))
    wanted = tool_call_grammar("kimi_k3", TOOLS, "required", starts_after=K3_THINK)
    assert bench.takes(wanted, f"Hm: <b> {{.{K3_THINK}{calls}")
    assert not bench.takes(wanted, calls, ends=False)
    assert not bench.takes(wanted, f"Hm.<|open|>tools<|sep|>{K3_THINK}{calls}", ends=False)
    in_response = tool_call_grammar("kimi_k3", TOOLS, "required")
    assert bench.takes(in_response, calls.removeprefix(K3_RESPONSE[0]))


def test_constrained_answers_of_kimi_k3_stand_in_their_section(bench: Bench) -> None:
    reasoning = REASONING_PARSERS["kimi_k3"]
    wanted = reasoning.in_channel(StructuredOutput.json_schema({"type": "integer"}))
    section = "5".join(K3_RESPONSE)
    assert bench.takes(wanted, section)
    assert bench.takes(wanted, f"5{K3_RESPONSE[1]}")  # after a prompt without thoughts
    assert not bench.takes(wanted, section.replace("5", "five"))
    assert not bench.takes(wanted, "5")
    calls = answer("kimi_k3", call("kimi_k3", "get-weather", GOOD, 1))
    either = answer_or_calls(wanted, "kimi_k3", TOOLS, starts_after=K3_THINK)
    for text in (section, calls):
        assert bench.takes(either, f"Hm.{K3_THINK}{text}")
    assert reasoning.own_tags_after(f"x{K3_RESPONSE[0]}") is None
    prompt = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    assert reasoning.end_after(prompt) == K3_THINK
    assert reasoning.end_after(prompt.replace("think", "response")) is None


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_strictness_binds_calls_that_the_model_decides_to_make(bench: Bench, parser: str) -> None:
    """Names, or schemas, too; text that is no call is free, and so is all where it is off."""
    lax = [tool(name["function"]["name"], strict=False) for name in TOOLS]
    assert tool_call_grammar(parser, lax, "auto") is None
    head = "<|channel|>final<|message|>" if parser == "gpt_oss" else ""
    good, stranger = call(parser, "get-weather", GOOD), call(parser, "get-whether", GOOD)
    other = call(parser, "get-weather", '{"other": 1}')
    for strictness in ("names", "schemas"):
        wanted = tool_call_grammar(parser, lax, "auto", strictness=strictness)
        assert bench.takes(wanted, head + "Let me see. {")
        assert bench.takes(wanted, answer(parser, good))
        assert not bench.takes(wanted, answer(parser, stranger))
        assert bench.takes(wanted, answer(parser, other)) == (strictness == "names")
    mixed = tool_call_grammar(parser, [lax[0], TOOLS[1]], "auto", strictness="names")
    assert bench.takes(mixed, answer(parser, other))
    assert not bench.takes(mixed, answer(parser, call(parser, "send.mail_2", '{"other": 1}')))
