"""Kimi-K2.6 with Eagle3: calls whose strings tokens cut within characters and escapes.

The whole way through the server, for every place where a token may end, in steps of every length.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted import ScriptWriter
from scripted_kimi import write_kimi
from scripted_serving import serving, streamed, whole_answer

from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.text import detokenizer

MOST_DRAFTS = 15
ARGUMENTS = (
    r'{"path": "北京/天气 😀.txt", "content": "他说:\"你好\"\n\t\u4f60\u597d \ud83d\ude00\\ 完。", '
    r'"größe": [1, "é\u0000"]}'
)
SECTION = (
    "好的。<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
CALLS = [("functions.write_file:0", "write_file", ARGUMENTS)]
EXPECTED = {"content": "好的。", "reasoning": "", "calls": CALLS, "reason": "tool_calls"}
TOOL: Any = {
    "type": "function",
    "function": {"name": "write_file", "parameters": {"type": "object"}},
}
# Tokens of so many bytes, the first of so many: each place is some token's end.
CUTS = [(size, first) for size in (1, 2, 3, 4, 7) for first in range(1, size + 1)]


class Kimi:
    """The checkpoints, and the messages that ask for the call in each way to cut it."""

    def __init__(self, folder: Path) -> None:
        writer = ScriptWriter(TOOL_PARSERS["kimi_k2"].markers)
        self.messages = {cut: writer.add(SECTION, size=cut[0], first=cut[1]) for cut in CUTS}
        self.target, self.drafts = write_kimi(writer, folder)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Kimi:
    return Kimi(tmp_path_factory.mktemp("kimi"))


async def _answers(
    client: openai.AsyncOpenAI, message: str, **speculation: Any
) -> list[dict[str, Any]]:
    """Streamed and whole."""
    request: dict[str, Any] = {
        "model": "scripted",
        "messages": [{"role": "user", "content": message}],
        "tools": [TOOL],
        "max_completion_tokens": 1000,
        "extra_body": speculation,
    }
    return list(await asyncio.gather(*(ask(client, **request) for ask in (streamed, whole_answer))))


async def _check(
    kimi: Kimi, draft: str, cuts: Sequence[tuple[int, int]], ks: Sequence[int]
) -> None:
    """Every answer is the one without speculation, and complete."""
    async with serving((kimi.target, kimi.drafts[draft]), MOST_DRAFTS, ["kimi_k2"]) as (
        engine,
        clients,
    ):
        messages = [kimi.messages[cut] for cut in cuts]
        wishes: list[dict[str, Any]] = [{"speculation": False}]
        wishes += [{"num_speculative_tokens": k} for k in ks]
        for wish in wishes:
            found = await asyncio.gather(
                *(_answers(clients["kimi_k2"], message, **wish) for message in messages)
            )
            for cut, answers in zip(cuts, found, strict=True):
                assert answers == [EXPECTED, EXPECTED], (draft, cut, wish)
        stats = engine.stats.spec_decode
        assert stats is not None
        assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens


def test_places(kimi: Kimi) -> None:
    """The arguments are JSON, and tokens end everywhere, within characters too."""
    assert json.loads(ARGUMENTS)["content"] == '他说:"你好"\n\t你好 😀\\ 完。'
    size = len(ARGUMENTS.encode())
    ends = {first + i for size_, first in CUTS if size_ > 1 for i in range(0, size, size_)}
    assert ends >= set(range(1, size))
    assert kimi.messages.keys() == set(CUTS)


@pytest.mark.parametrize(
    ("draft", "cuts", "ks"),
    [("mha", [(1, 1), (2, 1), (3, 1)], [1, 4]), ("mla", [(3, 2), (7, 4)], [3, 15])],
    ids=["mha", "mla"],
)
async def test_kimi_k26_with_eagle3(
    kimi: Kimi, draft: str, cuts: list[tuple[int, int]], ks: list[int]
) -> None:
    await _check(kimi, draft, cuts, ks)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["mha", "mla"])
async def test_every_cut_and_number_of_drafts(kimi: Kimi, draft: str) -> None:
    await _check(kimi, draft, CUTS, range(1, MOST_DRAFTS + 1))


async def test_bytes_lost_at_the_end_of_a_step_are_found(
    kimi: Kimi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: a detokenizer that forgets what a step left unfinished."""
    feed = detokenizer._ByteLevelDetokenizer.feed

    def forgetful(self: Any, token_ids: Sequence[int]) -> str:
        text = feed(self, token_ids)
        self._decoder.reset()
        return text

    monkeypatch.setattr(detokenizer._ByteLevelDetokenizer, "feed", forgetful)
    with pytest.raises(AssertionError):
        await _check(kimi, "mha", [(3, 1)], [3])
