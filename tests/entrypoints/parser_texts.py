"""Answers in every format of tool calls, written from what they mean."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from atom.entrypoints.parsing.deltas import ChatDelta, ParsedMessage
from atom.entrypoints.parsing.output_parser import ChatOutputParser
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS

THINK = REASONING_PARSERS["think_tags"]


@dataclass(frozen=True)
class Call:
    """`arguments` is JSON text."""

    name: str
    arguments: str


Part = str | list[Call]  # content, or calls in one section


@dataclass(frozen=True)
class Spelling:
    """One format.

    Attributes:
        calls: spells calls that follow one another; given the number of calls before.
        is_sectioned: content may precede calls.
        is_typed: arguments are no JSON, and strings where no schema says otherwise.
        streams: arguments come before they are whole.
        num_calls: an answer holds so many at most.
    """

    name: str
    calls: Callable[[Sequence[Call], int], str]
    is_sectioned: bool = True
    is_typed: bool = False
    streams: bool = True
    num_calls: int = 16

    def spell(self, parts: Iterable[Part]) -> str:
        text, count = "", 0
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                text += self.calls(part, count)
                count += len(part)
        return text

    def expect_id(self, call: Call, index: int) -> str | None:
        return f"functions.{call.name}:{index}" if self.name == "kimi_k2" else None

    @property
    def markers(self) -> tuple[str, ...]:
        return (*TOOL_PARSERS[self.name].markers, *THINK.markers)


def _kimi(calls: Sequence[Call], start: int) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{c.name}:{i}<|tool_call_argument_begin|>{c.arguments}"
        "<|tool_call_end|>"
        for i, c in enumerate(calls, start)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _kimi_k3(calls: Sequence[Call], start: int) -> str:
    body = "".join(
        f'<|open|>call tool="{c.name}" index="{i}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
            for key, value in json.loads(c.arguments).items()
        )
        + "<|close|>call<|sep|>"
        for i, c in enumerate(calls, start + 1)
    )
    return f"<|open|>tools<|sep|>{body}<|close|>tools<|sep|>"


def _hermes(calls: Sequence[Call], start: int) -> str:
    del start
    return "\n".join(f"<tool_call>\n{_object(c, 'arguments')}\n</tool_call>" for c in calls)


def _llama(calls: Sequence[Call], start: int) -> str:
    del start
    return "; ".join(_object(c, "parameters") for c in calls)


def _deepseek(calls: Sequence[Call], start: int) -> str:
    del start
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.arguments}\n```"
        "<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call], start: int) -> str:
    del start
    body = "".join(
        f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{c.arguments}<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _mistral(calls: Sequence[Call], start: int) -> str:
    del start
    return f"[TOOL_CALLS][{', '.join(_object(c, 'arguments') for c in calls)}]"


def _mistral_named(calls: Sequence[Call], start: int) -> str:
    del start
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.arguments}" for c in calls)


def _qwen3_coder(calls: Sequence[Call], start: int) -> str:
    del start
    return "\n".join(
        f"<tool_call>\n<function={c.name}>\n"
        + "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n"
            for key, value in json.loads(c.arguments).items()
        )
        + "</function>\n</tool_call>"
        for c in calls
    )


def _glm45(calls: Sequence[Call], start: int) -> str:
    del start
    return "\n".join(
        f"<tool_call>{c.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in json.loads(c.arguments).items()
        )
        + "</tool_call>"
        for c in calls
    )


def _glm47(calls: Sequence[Call], start: int) -> str:
    del start
    return "".join(
        f"<tool_call>{c.name}"
        + "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in json.loads(c.arguments).items()
        )
        + "</tool_call>"
        for c in calls
    )


def _minimax_m2(calls: Sequence[Call], start: int) -> str:
    del start
    body = "".join(
        f'<invoke name="{c.name}">\n'
        + "".join(
            f'<parameter name="{key}">{value}</parameter>\n'
            for key, value in json.loads(c.arguments).items()
        )
        + "</invoke>\n"
        for c in calls
    )
    return f"<minimax:tool_call>\n{body}</minimax:tool_call>"


def _gpt_oss(calls: Sequence[Call], start: int) -> str:
    del start
    (call,) = calls
    return (
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{call.arguments}<|call|>"
    )


def _pythonic(calls: Sequence[Call], start: int) -> str:
    del start
    written = []
    for call in calls:
        pairs = [f"{key}={value!r}" for key, value in json.loads(call.arguments).items()]
        written.append(f"{call.name}({', '.join(pairs)})")
    return f"[{', '.join(written)}]"


def _object(call: Call, key: str) -> str:
    return f'{{"name": {json.dumps(call.name)}, "{key}": {call.arguments}}}'


KIMI = Spelling("kimi_k2", _kimi)
HERMES = Spelling("hermes", _hermes)
SPELLINGS = (
    KIMI,
    HERMES,
    Spelling("kimi_k3", _kimi_k3, is_typed=True),
    Spelling("llama3_json", _llama, is_sectioned=False),
    Spelling("deepseek_v3", _deepseek),
    Spelling("deepseek_v31", _deepseek_v31),
    Spelling("glm45", _glm45, is_typed=True),
    Spelling("glm47", _glm47, is_typed=True),
    Spelling("minimax_m2", _minimax_m2, is_typed=True),
    Spelling("gpt_oss", _gpt_oss, num_calls=1),
    Spelling("mistral", _mistral),
    Spelling("mistral_named", _mistral_named),
    Spelling("pythonic", _pythonic, is_sectioned=False, is_typed=True, streams=False),
    Spelling("qwen3_coder", _qwen3_coder, is_typed=True),
)


def create_parser(tool_parser: str | None, *, reasons: bool = False) -> ChatOutputParser:
    return ChatOutputParser(tool_parser, "think_tags", None, reasons)


def stream(parser: ChatOutputParser, chunks: Iterable[str], reason: str) -> list[ChatDelta]:
    """Feed and finish; what comes must keep OpenAI's contract."""
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    deltas += parser.finish(reason)
    check_contract(deltas)
    return deltas


def read(parser: ChatOutputParser, chunks: Iterable[str], reason: str = "stop") -> ParsedMessage:
    return ParsedMessage.of(stream(parser, chunks, reason))


def check_contract(deltas: Sequence[ChatDelta]) -> None:
    num_calls = 0
    for delta in deltas:
        said = (delta.content, delta.reasoning_content, delta.tool_calls)
        assert sum(field is not None for field in said) == 1
        assert all(field for field in said if field is not None)
        for piece in delta.tool_calls or ():
            if piece.id is not None:
                assert piece.index == num_calls
                assert piece.id
                assert piece.type == "function"
                assert piece.function.name
                num_calls += 1
            else:
                assert piece.index == num_calls - 1
                assert piece.type is None
                assert piece.function.name is None
                assert piece.function.arguments


def cuttings(text: str) -> Iterator[list[str]]:
    """The text whole, by characters, in the sizes of speculative steps, and at random."""
    for size in (len(text) or 1, 1, 2, 4, 8):
        yield [text[i : i + size] for i in range(0, len(text), size)]
    for seed in range(20):
        sizes = random.Random(seed)
        chunks, start = [], 0
        while start < len(text):
            size = sizes.randint(2, 7)
            chunks.append(text[start : start + size])
            start += size
        yield chunks
