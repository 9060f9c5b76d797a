"""Tool calls over HTTP from a real engine that speculates: nothing depends on the steps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from parser_texts import SPELLINGS, Call, Part, Spelling, create_parser
from scripted import ScriptWriter, write_models
from scripted_serving import Ask, serving, streamed, whole_answer

from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS

NAMES = ("get_weather", "write-file")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in NAMES
]
SERVED = ("kimi_k2", "kimi_k3", "hermes", "llama3_json", "deepseek_v3")
SCRIPTED = [s for s in SPELLINGS if s.name in SERVED]
LONG = json.dumps(
    {"path": "北京/天气 😀.txt", "content": "".join(chr(0x4E00 + 7 * i) for i in range(2700))},
    ensure_ascii=False,
)
SHORT = '{"city": "北京 😀", "quote": "\\"}\\n"}'


def _parts(spelling: Spelling, first: Call) -> list[Part]:
    calls: list[Part] = [[first, Call(NAMES[1], '{"x": ["é", 1]}')]]
    return ["我来看看。", *calls, " 好了。"] if spelling.is_sectioned else calls


class Scripts:
    """What the model says, by format: (message, text, starts within reasoning)."""

    def __init__(self) -> None:
        formats = TOOL_PARSERS.values()
        markers = [m for format in formats for m in format.special_tokens or format.markers]
        self.writer = ScriptWriter(markers)
        self.by_format: dict[str, list[tuple[str, str, bool]]] = {}
        for spelling in SCRIPTED:
            long = spelling.spell(_parts(spelling, Call(NAMES[1], LONG)))
            short = "想一想…</think>" + spelling.spell(_parts(spelling, Call(NAMES[0], SHORT)))
            self.by_format[spelling.name] = [
                (self.writer.add(text, thinks=thinks), text, thinks)
                for text, thinks in ((long, False), (short, True))
            ]


@pytest.fixture(scope="module")
def scripts() -> Scripts:
    return Scripts()


@pytest.fixture(scope="module")
def checkpoints(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_models(scripts.writer, tmp_path_factory.mktemp("scripted"))


def _request(message: str, thinks: bool, **fields: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": message}],
        "tools": TOOLS,
        "max_completion_tokens": 2500,
        "extra_body": {"chat_template_kwargs": {"thinking": thinks}},
        **fields,
    }


def _expected(name: str, text: str, thinks: bool) -> dict[str, Any]:
    parser = create_parser(name, reasons=thinks)
    message = parser.parse_complete(text, "stop")
    return {
        "content": message.content or "",
        "reasoning": message.reasoning_content or "",
        "calls": [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls],
        "reason": "tool_calls",
    }


def _check(name: str, said: dict[str, Any], expected: dict[str, Any]) -> None:
    ids = [call[0] for call in said["calls"]]
    assert len(set(ids)) == len(ids) == 2
    if name != "kimi_k2":  # ids are the server's
        assert all(ids)
        said = {**said, "calls": [("", *call[1:]) for call in said["calls"]]}
        expected = {**expected, "calls": [("", *call[1:]) for call in expected["calls"]]}
    assert said == expected


@pytest.mark.parametrize("k", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 7))])
async def test_calls_over_http(scripts: Scripts, checkpoints: tuple[Path, Path], k: int) -> None:
    assert len(LONG.encode()) > 8000
    async with serving(checkpoints, k, list(scripts.by_format)) as (engine, clients):
        await asyncio.gather(
            *(
                _check_call(ask, name, clients[name], *case)
                for name, cases in scripts.by_format.items()
                for case in cases
                for ask in (whole_answer, streamed)
            )
        )
        stats = engine.stats.spec_decode
        assert stats is not None
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
        if k == 3:
            await _check_crowd(scripts, clients)
            await _check_cut(scripts, clients["kimi_k2"])
            await _check_choices(scripts, clients["hermes"])


async def _check_call(
    ask: Ask, name: str, client: openai.AsyncOpenAI, message: str, text: str, thinks: bool
) -> None:
    said = await ask(client, **_request(message, thinks))
    _check(name, said, _expected(name, text, thinks))


async def _check_crowd(scripts: Scripts, clients: dict[str, openai.AsyncOpenAI]) -> None:
    """16 streams at once say what each says alone."""
    crowd = [(name, *cases[1]) for name, cases in scripts.by_format.items()] * 4
    answers = await asyncio.gather(
        *(streamed(clients[name], **_request(m, thinks)) for name, m, _, thinks in crowd)
    )
    for (name, _, text, thinks), said in zip(crowd, answers, strict=True):
        _check(name, said, _expected(name, text, thinks))


async def _check_cut(scripts: Scripts, client: openai.AsyncOpenAI) -> None:
    message, _, thinks = scripts.by_format["kimi_k2"][0]
    request = _request(message, thinks, max_completion_tokens=50)
    whole = await whole_answer(client, **request)
    assert await streamed(client, **request) == whole
    assert whole["reason"] == "length"
    ((call_id, name, arguments),) = whole["calls"]
    assert (call_id, name) == ("functions.write-file:0", "write-file")
    assert 100 < len(arguments.encode()) < 1000
    assert LONG.startswith(arguments.rstrip("\ufffd"))


async def _check_choices(scripts: Scripts, client: openai.AsyncOpenAI) -> None:
    """`n` and `logprobs` with tools: every token's row comes, whichever chunk brings it."""
    message, _, thinks = scripts.by_format["hermes"][1]
    request = _request(message, thinks, n=2, logprobs=True, top_logprobs=1)
    whole = await client.chat.completions.create(**request)
    assert whole.usage is not None
    tokens: dict[int, list[str]] = {0: [], 1: []}
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                tokens[choice.index] += [row.token for row in choice.logprobs.content or ()]
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        assert len(choice.message.tool_calls or ()) == 2
        assert choice.logprobs is not None
        assert tokens[choice.index] == [row.token for row in choice.logprobs.content or ()]
        assert 2 * len(tokens[choice.index]) == whole.usage.completion_tokens
